"""The cross entropy of logits whose weight is in tiles of words, a tile at a time.

The logits of one tile give their maximum, the sum of their exponentials and, if the
label is among them, its logit. So the segments of tiles pass on three numbers a token,
and all logits never exist at once: those of 512 tokens and 151,936 words are 297 MiB
in float32, and their gradient is as large.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Emitter, Graph, calls_rule, variables
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, literal
from zinf.core.jaxpr.primitives import ELEMENTWISE
from zinf.core.problem.cross_entropy import cross_entropy
from zinf.core.segment.tile_rules import Split, write_piece

IN_LOSS = "in the loss"


@dataclass(frozen=True)
class Chain:
    """A product, the elementwise equations after it, and the loss of their result.

    Nothing else reads any of these values, the losses aside.

    Attributes:
        steps: each with the number of the operand that comes from the product.
    """

    product: Equation
    steps: tuple[tuple[Equation, int], ...]
    loss: Equation

    @property
    def between(self) -> list[Var]:
        return [e.outvars[0] for e, _ in self.steps]

    def mapped(self, function: Callable[[Equation], Equation]) -> "Chain":
        """The chain whose equations are the results of a function."""
        steps = tuple((function(e), n) for e, n in self.steps)
        return Chain(function(self.product), steps, function(self.loss))


def find_chains(graph: Graph) -> dict[Var, Chain]:
    """The chains of a program, by the result of their product."""
    producers = {v: e for e in graph.equations for v in e.outvars}
    atoms = [a for e in graph.equations for a in e.invars]
    counts = Counter(variables([*atoms, *graph.outvars]))
    found = {}
    for equation in graph.equations:
        if not _is_loss(equation):
            continue
        steps: list[tuple[Equation, int]] = []
        atom = equation.invars[0]
        while counts[atom] == 1 and atom in producers:
            before = producers[atom]
            if before.primitive.name == "dot_general":
                found[atom] = Chain(before, tuple(reversed(steps)), equation)
                break
            number = _place(before)
            if number is None:
                break
            steps.append((before, number))
            atom = before.invars[number]
    return found


def _is_loss(equation: Equation) -> bool:
    if len(equation.invars) != 2:
        return False
    logits, labels = equation.invars
    return (
        not isinstance(logits, Literal)
        and jnp.issubdtype(logits.aval.dtype, jnp.floating)
        and jnp.issubdtype(labels.aval.dtype, jnp.integer)
        and logits.aval.shape[:-1] == labels.aval.shape
        and calls_rule(equation, cross_entropy, (True, False))
    )


def _place(equation: Equation) -> int | None:
    """Index of the only operand of the result's shape, if elementwise; else None."""
    shape = equation.outvars[0].aval.shape
    is_plain = not equation.effects and len(equation.outvars) == 1
    places = [
        n
        for n, a in enumerate(equation.invars)
        if not isinstance(a, Literal) and a.aval.shape == shape
    ]
    fits = equation.primitive.name in ELEMENTWISE and is_plain and len(places) == 1
    return places[0] if fits else None


def write_losses(
    emitter: Emitter,
    chain: Chain,
    number: int,
    split: Split,
    pieces: Sequence[Atom],
) -> Atom:
    """Writes a chain for the pieces of operand `number` of its product: the losses."""
    logits, labels = chain.loss.invars
    (losses,) = chain.loss.outvars
    words = Split(logits.aval.ndim - 1, split.edges)
    dtype = jnp.promote_types(losses.aval.dtype, jnp.float32)
    (labels,) = emitter.apply(partial(_counted, num_words=split.edges[-1]), labels)
    so_far = emitter.apply(partial(_nothing, losses.aval.shape, dtype))
    for index, (piece, (start, _)) in enumerate(zip(pieces, split.ranges, strict=True)):
        atom = write_piece(emitter, chain.product, number, split, words, index, piece)
        for step, place in chain.steps:
            atom = write_piece(emitter, step, place, words, words, index, atom)
        # A literal becomes an argument of the code, so that equal tiles share the code.
        first = literal(np.int32(start))
        so_far = emitter.apply(_with_tile, *so_far, atom, labels, first)
    (total,) = emitter.apply(partial(_losses, dtype=losses.aval.dtype), *so_far)
    return total


def _counted(labels: jax.Array, num_words: int) -> jax.Array:
    """Labels from 0; negative ones are counted from the end, as `jnp` does."""
    labels = labels if labels.dtype.itemsize == 8 else labels.astype(jnp.int32)
    return jnp.where(labels < 0, labels + num_words, labels)


def _nothing(
    shape: tuple[int, ...], dtype: np.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maximum, the sum and the label's logit of no words at all.

    A label that no tile has gives NaN, as a look-up beyond the logits does.
    """
    numbers = -jnp.inf, 0, jnp.nan
    best, total, picked = (jnp.full(shape, x, dtype) for x in numbers)
    return best, total, picked


def _with_tile(
    best: jax.Array,
    total: jax.Array,
    picked: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum and label's logit after the logits (..., words) of one more tile."""
    logits, best = logits.astype(total.dtype), jax.lax.stop_gradient(best)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    peak = jnp.maximum(best, highest)
    base = _finite(peak)
    part = jnp.sum(jnp.exp(logits - jnp.expand_dims(base, -1)), axis=-1)
    total = total * jnp.exp(best - base) + part
    places = jnp.expand_dims(labels - first.astype(labels.dtype), -1)
    words = jax.lax.broadcasted_iota(places.dtype, logits.shape, logits.ndim - 1)
    is_label = words == places
    mine = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    return peak, total, jnp.where(jnp.any(is_label, axis=-1), mine, picked)


def _losses(
    best: jax.Array, total: jax.Array, picked: jax.Array, dtype: np.dtype
) -> jax.Array:
    return (jnp.log(total) + _finite(best) - picked).astype(dtype)


def _finite(best: jax.Array) -> jax.Array:
    """The maximum to subtract before exponentials; 0 where it is not finite."""
    best = jax.lax.stop_gradient(best)
    return jnp.where(jnp.isfinite(best), best, 0)
