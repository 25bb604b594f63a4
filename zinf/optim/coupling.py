"""Refuses transforms whose updates of different parameters depend on one another."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from zinf.jaxpr import Graph, variables
from zinf.jaxpr.compat import Equation, Var

CLIPPING = (
    "If this clips by the global norm, remove it and set `gradient_clipping` in the "
    "config, which does the same. Otherwise zinf cannot run this transform: it updates "
    "each parameter by itself."
)
SKIPPING = (
    "If this skips steps with non-finite gradients, remove it and enable `fp16` in the "
    "config, whose loss scaling skips steps that overflow (zinf always reports a "
    "non-finite loss)."
)


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
    is_finite = False
    for equation in graph.equations:
        is_finite |= equation.primitive.name == "is_finite"
        bits = found.get(equation.outvars[0], 0) if equation.outvars else 0
        if bits.bit_count() > 1:
            numbers = members(bits)
            first, second = paths[next(numbers)], paths[next(numbers)]
            raise ValueError(
                f"The optimizer couples parameters: `{equation.primitive.name}`"
                f"{_source(equation)} depends on both {first!r} and {second!r}. "
                f"{SKIPPING if is_finite else CLIPPING}"
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
    # The transform itself says more than the tree arithmetic that it calls.
    updates = [f for f in frames if "update" in f.function_name]
    for frame in (*updates, *frames):
        name = Path(frame.file_name).name
        return f" at {name}:{frame.line_num} ({frame.function_name})"
    return ""
