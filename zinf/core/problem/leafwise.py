"""Initialises parameters leaf by leaf, so that memory never holds the whole model.

The init function is traced, and each leaf gets the part of the program that computes
it. Random keys and other small values are evaluated separately, when a leaf needs them.
The rest of two equal layers is then equal code with different keys, so each distinct
leaf is compiled once for all layers. So is taking a layer's key from an array of keys,
as its position is an argument.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Body, Graph, Piece, Shared, flatten, share, trace
from zinf.core.jaxpr.compat import (
    Atom,
    Equation,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
)
from zinf.core.jaxpr.slice import Slicer
from zinf.core.jaxpr.static_slice import at_places, is_dense
from zinf.core.problem.source import named_leaves

# Values up to this size are evaluated operation by operation: keys and counters.
# Weights are not: dozens of operations would each be compiled for each shape (with 4
# KiB that was a third of the start-up time of a model of 16 channels).
SMALL_BYTES = 256
# The limit for an array of keys, which may hold those of all layers. Untyped keys are
# recognised by the numbers in a key (threefry, rbg); narrow weights match too.
SMALL_KEY_BYTES = 64 * 1024
SMALL_RAW_KEY_BYTES = 4 * 1024
KEY_NUMBERS = 2, 4


def initialize(
    init_fn: Callable[[], Any], *, device: jax.Device | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yields `(key path, array)` of the tree that `init_fn()` returns, leaf by leaf.

    Values are those of `jax.jit(init_fn)()`: random bits equal, floats up to rounding.
    This function holds one leaf at a time, and small values that later leaves share.
    Drop a leaf before asking for the next. A leaf computed from a larger value, such as
    a slice of one random vector, needs that value in memory too.

    Args:
        init_fn: traced once; it may close over arrays and make random keys.
        device: where leaves are computed and live (`None`: jax's default).
    """
    yield from Leafwise(init_fn, device=device)()


class Leafwise:
    """A function whose leaves are made one after another, any number of times.

    It is traced once, and compiles nothing in later calls. See `initialize`.

    Args:
        arguments: shapes and dtypes of what `function` is called with.
    """

    def __init__(
        self, function: Callable, *arguments: Any, device: jax.Device | None = None
    ):
        closed, structure = trace(function, *arguments)
        self._graph = flatten(closed)
        self._paths = list(named_leaves(structure))
        self._recipes, self._last_use = _recipes(self._graph)
        self._device = device
        self._compiled: dict[Body, Callable] = {}

    def __call__(self, *arguments: Any) -> Iterator[tuple[str, jax.Array]]:
        """Yields `(key path, array)` of what the function returns, leaf by leaf."""
        known: dict[Var, Any] = dict(self._graph.consts)
        given = jax.tree.leaves(arguments)
        known.update(zip(self._graph.invars, given, strict=True))
        pairs = zip(self._paths, self._recipes, strict=True)
        for number, (path, recipe) in enumerate(pairs):
            yield path, _make(recipe, known, self._compiled, self._device)
            for variable in self._last_use.get(number, ()):
                del known[variable]


def abstract_leaves(source: Any) -> Any:
    """Shapes and dtypes of a pytree of arrays, or of what a function returns.

    A leaf that is not an array is refused.
    """
    if is_function(source):
        return jax.eval_shape(source)
    named = {
        path: jax.eval_shape(lambda x=x: jnp.asarray(x))
        for path, x in leaves_of(source)
    }
    structure = jax.tree.structure(source)
    return jax.tree.unflatten(structure, [named[path] for path in named_leaves(source)])


def is_function(source: Any) -> bool:
    """False for a pytree that can be called, such as an Equinox module."""
    return callable(source) and jax.tree_util.all_leaves([source])


def leaves_of(params: Any) -> Iterator[tuple[str, Any]]:
    """Yields `(key path, array)` of a ready pytree, leaf by leaf.

    jax arrays come as they are; NumPy arrays and Python or NumPy numbers come as NumPy
    arrays of the dtype that jax would give them.

    Raises:
        ValueError: a leaf is not an array of numbers.
    """
    for path, leaf in named_leaves(params).items():
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise ValueError(
                    f"The parameter leaf {path!r} was deleted, as jax.jit does with "
                    "arguments that are donated to it. Give zinf the new array that "
                    "that function returned, or a copy made before."
                )
            yield path, leaf
            continue
        if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            if np.asarray(leaf).dtype.kind not in "OSUMmT":
                yield path, np.asarray(leaf, dtype=jnp.result_type(leaf))
                continue
        raise ValueError(
            f"The parameter leaf {path!r} is not an array of numbers but a "
            f"{type(leaf).__name__}: {leaf!r:.80}. Keep such values out of `params`: "
            "close over them in the loss function, or split the model first "
            "(flax: nnx.split, equinox: eqx.partition)."
        )


@dataclass(frozen=True)
class _Recipe:
    """How a leaf is made: small values first, then the rest in one executable.

    `small` computes `small_outputs`, the values that are needed after it. `leaf` is the
    leaf itself if it is small or given; else `code` computes it from `inputs`.
    """

    small: Piece
    leaf: Atom
    code: Shared | None
    inputs: tuple[Var, ...]


def _make(
    recipe: _Recipe,
    known: dict[Var, Any],
    compiled: dict[Body, Callable],
    device: jax.Device | None,
) -> jax.Array:
    """Computes one leaf, and adds its small values to `known`."""
    small, code = recipe.small, recipe.code
    with jax.default_device(device):
        jaxpr = build_jaxpr(small.invars, small.outvars, small.equations)
        values = evaluate(jaxpr, [known[v] for v in small.invars])
        known.update(zip(small.outvars, values, strict=True))
        if isinstance(recipe.leaf, Literal):
            leaf = jnp.asarray(recipe.leaf.val, dtype=recipe.leaf.aval.dtype)
        elif code is None:
            leaf = jnp.asarray(known[recipe.leaf])
        else:
            if code.body not in compiled:
                compiled[code.body] = jax.jit(code.body.__call__)
            arguments = [known[v] for v in recipe.inputs]
            (leaf,) = compiled[code.body](*arguments, *code.hoisted)
    # An array that `init_fn` closed over may be on another device, and so its results.
    return leaf if device is None else jax.device_put(leaf, device)


def _recipes(graph: Graph) -> tuple[list[_Recipe], Mapping[int, Sequence[Var]]]:
    """How to make each leaf, and which values are not needed after leaf i."""
    small = _small_values(graph)
    slicer = Slicer(graph)
    pieces, parts = [], []
    made: set[Var] = {*graph.consts, *graph.invars}
    last_use: dict[Var, int] = {}
    for number, leaf in enumerate(graph.outvars):
        rest = slicer.behind([leaf], stop=small)
        before = slicer.behind(rest.inputs, stop=made)
        outputs = tuple(v for e in before.equations for v in e.outvars)
        made.update(outputs)
        equations = tuple(map(_at_position, before.equations))
        parts.append(Piece(before.inputs, outputs, equations))
        pieces.append(Piece(rest.inputs, (leaf,), rest.equations))
        read = *before.inputs, *outputs, *rest.inputs
        last_use.update(dict.fromkeys(read, number))
    codes = share(pieces)
    recipes = [
        _Recipe(part, piece.outvars[0], code if piece.equations else None, piece.invars)
        for part, piece, code in zip(parts, pieces, codes, strict=True)
    ]
    expiring: dict[int, list[Var]] = {}
    for variable, number in last_use.items():
        expiring.setdefault(number, []).append(variable)
    return recipes, expiring


def _at_position(equation: Equation) -> Equation:
    """A slice with its position as an argument; any other equation as it is.

    Alone, a slice is compiled for each position: 20 ms of a processor for the key of
    each leaf. It copies, so that both forms give the same bits.
    """
    return at_places(equation, np.int32) if is_dense(equation) else equation


def _small_values(graph: Graph) -> set[Var]:
    """Values known beforehand: constants and arguments, and small values of these."""
    small = {*graph.consts, *graph.invars}
    for equation in graph.equations:
        if all(isinstance(a, Literal) or a in small for a in equation.invars):
            if all(_is_small(v) for v in equation.outvars):
                small.update(equation.outvars)
    return small


def _is_small(variable: Var) -> bool:
    dtype, shape = variable.aval.dtype, variable.aval.shape
    limit = SMALL_BYTES
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        limit = SMALL_KEY_BYTES
    elif dtype == jnp.uint32 and shape and shape[-1] in KEY_NUMBERS:
        limit = SMALL_RAW_KEY_BYTES
    return prod(shape) * dtype.itemsize <= limit
