"""Refuses transforms whose updates of different parameters depend on one another."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from zinf.core.jaxpr import Graph, variables
from zinf.core.jaxpr.compat import Equation, Var

LEARNING_RATE = (
    "This optimizer estimates a learning rate from all parameters at once, and zinf "
    "updates each by itself. Use one with a learning rate, such as optax.adamw."
)
# Advice about a coupling, by a word in the name of the function that made it.
HINTS = {
    "clip_by_global_norm": (
        "zinf clips by the norm of gradients as they come: where "
        "optax.clip_by_global_norm, with a plain positive number, is the first "
        "transform of the chain, or of the chain of a part (optax.partition, "
        "optax.masked). Put it there, or use optax.clip or optax.adaptive_grad_clip, "
        "which clip each parameter by itself."
    ),
    "apply_if_finite": (
        "zinf stops at a loss or gradient that is not finite, with nothing updated. "
        "Remove optax.apply_if_finite, and set `skip_nonfinite` in the config to its "
        "max_consecutive_errors: so many steps in a row are then skipped. With `fp16`, "
        "loss scaling skips steps that overflow."
    ),
    "polyak": (
        "The Polyak step divides the loss by the norm of all updates, and zinf updates "
        "each parameter by itself. Use a schedule, or optax.contrib.reduce_on_plateau, "
        "which reads the loss alone."
    ),
    "prodigy": LEARNING_RATE,
    "dadapt": LEARNING_RATE,
    "momo": LEARNING_RATE,
    "mechan": LEARNING_RATE,
    "dowg": LEARNING_RATE,
    "dog": LEARNING_RATE,
    "normaliz": (
        "This divides by the norm of all gradients, and zinf updates each parameter by "
        "itself. optax.scale_by_trust_ratio does the like for each parameter."
    ),
}
NORM = (
    "If this clips by the global norm, put optax.clip_by_global_norm first in the "
    "chain instead, or set `gradient_clipping` in the config, which divides by the "
    "norm + 1e-6 as torch does. zinf does both. Otherwise zinf cannot run this "
    "transform: it updates each parameter by itself."
)
OTHER = "zinf cannot run this transform: it updates each parameter by itself."


def dependencies(graph: Graph, sources: Mapping[Var, int]) -> dict[Var, int]:
    """The union of `sources` (bit sets) behind each variable; absent means none.

    Exact up to equations: an output of an equation depends on all its inputs.
    """
    found = {v: bits for v, bits in sources.items() if bits}
    for equation in graph.equations:
        bits = 0
        for variable in variables(equation.invars):
            bits |= found.get(variable, 0)
        if bits:
            found.update(dict.fromkeys(equation.outvars, bits))
    return found


def members(bits: int) -> Iterator[int]:
    """The numbers in a bit set, smallest first."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def refuse_accumulation(tx: Any, state: Any) -> None:
    """Raises for `optax.MultiSteps`, which holds every gradient between steps."""
    nodes = jax.tree.leaves(state, is_leaf=_accumulates)
    if isinstance(tx, optax.MultiSteps) or any(_accumulates(x) for x in nodes):
        raise ValueError(
            "The optimizer contains optax.MultiSteps, which accumulates gradients in "
            "its state. Remove it and set `gradient_accumulation_steps` in the config, "
            "which does the same without a second copy of all gradients."
        )


def _accumulates(state: Any) -> bool:
    return isinstance(state, optax.MultiStepsState)


def refuse_coupling(
    graph: Graph, found: Mapping[Var, int], paths: Sequence[str]
) -> None:
    """Raises if a variable depends on two parameters (or on their gradients or state).

    Args:
        found: the parameters behind each variable, as `dependencies` gives them.
        paths: their names, by number.
    """
    for number, equation in enumerate(graph.equations):
        bits = found.get(equation.outvars[0], 0) if equation.outvars else 0
        if bits.bit_count() > 1:
            numbers = members(bits)
            first, second = paths[next(numbers)], paths[next(numbers)]
            source = _source(equation)
            raise ValueError(
                f"The optimizer couples parameters: `{equation.primitive.name}`"
                f"{source} depends on both {first!r} and {second!r}. "
                f"{_hint(source, graph.equations[number:])}"
            )


def refuse_joint(name: str, bits: int, paths: Sequence[str]) -> None:
    """Raises if one result is made from two parameters that no equation joins."""
    if bits.bit_count() > 1:
        first, second, *_ = (paths[i] for i in members(bits))
        raise ValueError(
            f"The optimizer couples parameters: {name} depends on both {first!r} and "
            f"{second!r}. zinf updates each parameter by itself."
        )


def _source(equation: Equation) -> str:
    """Where the transform's code made an equation, as " at file:line (function)"."""
    traceback = equation.source_info.traceback
    library = str(Path(jax.__file__).parent)
    frames = traceback.frames if traceback else []
    frames = [f for f in frames if not f.file_name.startswith(library)]
    # The transform's own frame is more useful than the tree arithmetic that it calls.
    updates = [f for f in frames if "update" in f.function_name]
    for frame in (*updates, *frames):
        name = Path(frame.file_name).name
        return f" at {name}:{frame.line_num} ({frame.function_name})"
    return ""


def _hint(source: str, rest: Sequence[Equation]) -> str:
    """What a user can do about coupled leaves, as the end of the error message.

    Args:
        source: where the equation that couples leaves was written; see `_source`.
        rest: that equation, and all after it.
    """
    for word, hint in HINTS.items():
        if word in source:
            return hint
    # A square root of one number made from several parameters: their norm.
    (coupled, *_), *_ = (e.outvars for e in rest)
    depends = dependencies(Graph((), (), tuple(rest), {}), {coupled: 1})
    roots = (e for e in rest if e.primitive.name in ("sqrt", "rsqrt"))
    is_norm = any(
        v.aval.shape == () and v in depends for e in roots for v in variables(e.invars)
    )
    return NORM if is_norm else OTHER
