"""Slices at fixed places: which are dense, and the same with places as operands."""

import jax
import numpy as np

from zinf.core.jaxpr.compat import Equation, literal


def is_dense(equation: Equation) -> bool:
    """Whether an equation is a `slice` that leaves out no entry between its ends."""
    if equation.primitive.name != "slice":
        return False
    strides = equation.params["strides"]
    return strides is None or all(stride == 1 for stride in strides)


def at_places(equation: Equation, dtype: type[np.generic]) -> Equation:
    """A dense slice as a `dynamic_slice`, whose places are literals of `dtype`."""
    starts = [literal(dtype(start)) for start in equation.params["start_indices"]]
    return equation.replace(
        primitive=jax.lax.dynamic_slice_p,
        invars=[*equation.invars, *starts],
        params={"slice_sizes": equation.outvars[0].aval.shape},
    )
