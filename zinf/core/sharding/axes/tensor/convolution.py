"""Writes convolutions of single channels as sums, for the gradients of their kernels.

XLA computes the gradient of such a kernel by a convolution in groups of the batch, and
adds it up over all devices. Devices along `tensor` have the same examples, so if others
have other examples it is `tensor` times too large (jaxlib 0.10.2). Mamba has such
convolutions. A sum of shifted products has the right gradient, and sends no more.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr import Emitter
from zinf.core.jaxpr.compat import Atom, Equation, open_jaxpr, with_inner
from zinf.core.jaxpr.rewrite import rewritten_program
from zinf.core.jaxpr.walk import CALLS, REMAT, inner, programs

OPENED = REMAT | {"scan"}


def has_groups(equations: Iterable[Equation]) -> bool:
    """Whether a program has convolutions in groups, also in programs inside it."""
    return any(
        _is_grouped(e) or any(has_groups(open_jaxpr(p)[0].eqns) for p in _inside(e))
        for e in equations
    )


def _inside(equation: Equation) -> list[Any]:
    # A Pallas kernel's program has references in place of arrays, and no convolution.
    return [] if equation.primitive.name == "pallas_call" else [*programs(equation)]


def _is_grouped(equation: Equation) -> bool:
    return (
        equation.primitive.name == "conv_general_dilated"
        and equation.params["feature_group_count"] > 1
    )


class Convolutions(Emitter):
    """Writes a program again, without convolutions in groups.

    Raises:
        NotImplementedError: groups have several channels, results are not as dense as
            inputs, or the convolution is in a program that is not written again.
    """

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        name, params = equation.primitive.name, equation.params
        if name in OPENED and has_groups([equation]):
            (inside,) = inner(equation)
            body, _ = rewritten_program(Convolutions(), inside.program)
            equation = with_inner(equation, body) or equation
        elif _is_grouped(equation) and _is_by_channel(equation):
            return self.apply(lambda x, w: _by_channel(x, w, params), *arguments)
        if name not in CALLS and has_groups([equation]):
            raise NotImplementedError(
                "mesh.tensor does not work yet with a convolution in groups of several "
                "channels, with strides, or in a function with a derivative of its "
                "own: XLA adds the gradient of its kernel up over devices that have "
                "the same examples. Use mesh.fsdp for these devices."
            )
        return super().emit(equation, arguments)


def _is_by_channel(equation: Equation) -> bool:
    """Whether each channel of the result is that of the input, as densely."""
    params, groups = equation.params, equation.params["feature_group_count"]
    numbers = params["dimension_numbers"]
    image, kernel = (a.aval.shape for a in equation.invars)
    channels = image[numbers.lhs_spec[1]], kernel[numbers.rhs_spec[0]]
    steps = *params["window_strides"], *params["lhs_dilation"]
    return channels == (groups, groups) and prod(steps) == 1


def _by_channel(image: Any, kernel: Any, params: Mapping[str, Any]) -> Any:
    """A convolution of each channel with its own kernel."""
    numbers, dtype = params["dimension_numbers"], image.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    x = image.transpose(numbers.lhs_spec).astype(wide)
    # (channels, 1, *window)
    w = kernel.transpose(numbers.rhs_spec)[:, 0].astype(wide)
    edges = [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in params["padding"])]
    x = jax.lax.pad(x, jnp.zeros((), wide), edges)
    dilation, window = params["rhs_dilation"], w.shape[1:]
    reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
    sizes = [n - r for n, r in zip(x.shape[2:], reach, strict=True)]
    total = jnp.zeros((*x.shape[:2], *sizes), wide)
    for place in product(*map(range, window)):
        starts = [d * k for d, k in zip(dilation, place, strict=True)]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        part = jax.lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends))
        weight = w[:, *place].reshape(1, -1, *(1 for _ in sizes))
        total += weight * part
    back = sorted(range(total.ndim), key=lambda n: numbers.out_spec[n])
    return total.transpose(back).astype(params["preferred_element_type"] or dtype)
