"""Writes convolutions in groups as sums, for the gradients of their kernels.

XLA computes the gradient of such a kernel by a convolution in groups of the batch, and
adds it up over all devices, as if each had examples of its own. If several have the
same ones, they count as many times (jaxlib 0.10.2). Such are the devices along
`tensor`, those along `seq` where positions are not cut, and on any mesh those that rows
are copied to because devices cannot divide them evenly. A sum of shifted products has
the right gradient, and sends no more. Mamba has such convolutions.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr import Emitter, written
from zinf.core.jaxpr.compat import Atom, Equation, open_jaxpr, with_inner
from zinf.core.jaxpr.rewrite import rewriting, rewritten_program
from zinf.core.jaxpr.walk import CALLS, REMAT, inner, programs
from zinf.core.sharding.mesh import Dim
from zinf.core.sharding.rule import AxisRule

OPENED = REMAT | {"scan"}


def without_groups(closed: Any, axis: str) -> Any:
    """A closed jaxpr without convolutions in groups.

    Args:
        axis: of the mesh, for messages.

    Raises:
        NotImplementedError: a convolution in groups is transposed (inputs are dilated),
            or in a program that is not written again.
    """
    if not has_groups(open_jaxpr(closed)[0].eqns):
        return closed
    return rewritten_program(_Writer(_as_sum, axis), closed)[0]


def without_uneven_groups(loss: Callable, rule: AxisRule) -> Callable:
    """A loss without convolutions in groups whose rows devices cannot divide evenly.

    A loss may leave fewer rows than devices, such as means over pairs of examples. XLA
    then divides rows among some devices and copies them to the others, which have the
    same examples too. Transposed convolutions stay, and those in programs that are not
    written again.
    """

    def write(writer: Emitter, equation: Equation) -> list[Atom] | None:
        numbers, (image, _) = equation.params["dimension_numbers"], equation.invars
        is_even = image.aval.shape[numbers.lhs_spec[0]] % rule.size(Dim.BATCH) == 0
        return None if is_even else _as_sum(writer, equation)

    return rewriting(loss, lambda closed, _: written(_Writer(write), closed))


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


class _Writer(Emitter):
    """Writes a program again, with something else for convolutions in groups.

    Attributes:
        write: `(self, equation) -> results` writes that; None: there is nothing else.
        axis: of the mesh that cannot have such convolutions, for a message; empty: they
            stay as they are.
    """

    def __init__(
        self, write: Callable[[Emitter, Equation], list[Atom] | None], axis: str = ""
    ) -> None:
        super().__init__()
        self.write, self.axis = write, axis

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        name = equation.primitive.name
        if name in OPENED and has_groups([equation]):
            (inside,) = inner(equation)
            writer = _Writer(self.write, self.axis)
            body, _ = rewritten_program(writer, inside.program)
            opened = with_inner(equation, body) or equation
            return super().emit(opened, arguments)
        if _is_grouped(equation):
            results = self.write(self, equation.replace(invars=arguments))
            if results is not None:
                return results
        if self.axis and name not in CALLS and has_groups([equation]):
            raise NotImplementedError(
                f"mesh.{self.axis} does not work yet with a transposed convolution in "
                "groups, or with one in a function with a derivative of its own: XLA "
                "adds the gradient of its kernel up over devices that have the same "
                "examples. Use mesh.fsdp for these devices."
            )
        return super().emit(equation, arguments)


def _as_sum(writer: Emitter, equation: Equation) -> list[Atom] | None:
    """Writes a convolution as a sum, unless its inputs are dilated."""
    params = equation.params
    if any(n > 1 for n in params["lhs_dilation"]):
        return None
    return writer.apply(lambda x, w: _summed(x, w, params), *equation.invars)


def _summed(image: Any, kernel: Any, params: Mapping[str, Any]) -> Any:
    """A convolution in groups as a sum over the places of its window."""
    numbers, dtype = params["dimension_numbers"], image.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    x = image.transpose(numbers.lhs_spec).astype(wide)
    edges = [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in params["padding"])]
    x = jax.lax.pad(x, jnp.zeros((), wide), edges)
    # (channels of the result, channels of a group, *window)
    w = kernel.transpose(numbers.rhs_spec).astype(wide)
    dilation, window = params["rhs_dilation"], w.shape[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
    steps = params["window_strides"]
    total: Any = 0
    for place in product(*map(range, window)):
        starts = [d * k for d, k in zip(dilation, place, strict=True)]
        rest = zip(starts, x.shape[2:], reach, strict=True)
        ends = [start + size - r for start, size, r in rest]
        shape, strides = x.shape[:2], (1, 1, *steps)
        part = jax.lax.slice(x, (0, 0, *starts), (*shape, *ends), strides)
        total += _mixed(part, w[:, :, *place], params)
    back = sorted(range(total.ndim), key=lambda n: numbers.out_spec[n])
    return total.transpose(back).astype(params["preferred_element_type"] or dtype)


def _mixed(part: Any, weight: Any, params: Mapping[str, Any]) -> Any:
    """Channels (batch, channels, ...), mixed within each group by (out, in) weights."""
    groups = params["feature_group_count"]
    if weight.shape == (groups, 1):
        return weight.reshape(1, -1, *(1 for _ in part.shape[2:])) * part
    apart = part.reshape(part.shape[0], groups, -1, *part.shape[2:])
    by_group = weight.reshape(groups, -1, weight.shape[1])
    precision = params["precision"]
    out = jnp.einsum("bgi...,goi->bgo...", apart, by_group, precision=precision)
    return out.reshape(part.shape[0], -1, *part.shape[2:])
