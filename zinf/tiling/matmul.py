"""The matmuls of a tiled layer: by a kernel where one can run, by XLA elsewhere."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf.tiling.splits import plus
from zinf_kernels import tiled_matmul
from zinf_kernels.device import Device, device_for, is_alone
from zinf_kernels.dispatch import Implementation, choose_name
from zinf_kernels.pieces import accumulator

EXISTING = ("mosaic_gpu", "xla")


def affine(
    parts: Sequence[Float[Array, "*batch in_i"]],
    kernels: Sequence[Float[Array, "in_i out"]],
    bias: Float[Array, " out"] | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """The sum of `part @ kernel` over tiles, plus a bias.

    XLA rounds each matmul, the sum and the result to the dtype of the parts. The
    kernel rounds only the result. It is called once for each tile, so that zinf can put
    each tile into a segment of its own. Both sum matmuls in float32.

    Args:
        parts: all of one dtype.
        implementation: "mosaic_gpu", "xla", or names in order of preference. By default
            the kernel if the program is traced for one Hopper GPU, or in
            `jax.shard_map`, and every tile has sizes that the kernel takes.

    Raises:
        ValueError: the implementation cannot run, with the reason.
    """
    kernels = [kernel.astype(parts[0].dtype) for kernel in kernels]
    found = _obstacles(parts, kernels, bias)
    if implementation is None and not found and not is_alone():
        # XLA would gather the operands of a kernel from all devices.
        implementation = "xla"
    name = choose_name(
        implementation, op="tiled matmul", existing=EXISTING, obstacles=found
    )
    return (_by_kernel if name == "mosaic_gpu" else _by_xla)(parts, kernels, bias)


def _by_xla(
    parts: Sequence[Array], kernels: Sequence[Array], bias: Array | None
) -> Array:
    pairs = zip(parts, kernels, strict=True)
    out = reduce(plus, [jnp.matmul(part, kernel) for part, kernel in pairs])
    out = out.astype(parts[0].dtype)
    # Expanded, for programs in which ranks are not promoted.
    return (
        out if bias is None else out + jnp.expand_dims(bias, tuple(range(out.ndim - 1)))
    )


def _by_kernel(
    parts: Sequence[Array], kernels: Sequence[Array], bias: Array | None
) -> Array:
    *first, last = zip(map(_rows, parts), kernels, strict=True)
    total = None
    for rows, kernel in first:
        total = _matmul(rows, kernel, residual=total, out_dtype=accumulator(rows.dtype))
    out = _matmul(*last, bias=bias, residual=total, out_dtype=_dtype(parts, bias))
    return out.reshape(*parts[0].shape[:-1], out.shape[1])


def _matmul(rows: Array, kernel: Array, **options: Any) -> Array:
    return tiled_matmul.matmul(rows, kernel, implementation="mosaic_gpu", **options)


def _obstacles(
    parts: Sequence[Array], kernels: Sequence[Array], bias: Array | None
) -> dict[str, str]:
    """The reason why the kernel cannot run on one of the tiles, if there is one."""
    device: Device = device_for(parts[0], kernels[0])
    residual = None
    if len(parts) > 1:
        residual = jax.ShapeDtypeStruct((), accumulator(parts[0].dtype))
    for part, kernel in zip(parts, kernels, strict=True):
        found = tiled_matmul.obstacles(
            device,
            a=jax.eval_shape(_rows, part),
            b=kernel,
            residual=residual,
            out_dtype=_dtype(parts, bias),
        )
        if found:
            return found
    return {}


def _dtype(parts: Sequence[Array], bias: Array | None) -> Any:
    """The dtype of the result: a bias that is wider than the layer makes it wide."""
    return jnp.result_type(parts[0], *([] if bias is None else [bias]))


def _rows(x: Float[Array, "*batch k"]) -> Float[Array, "rows k"]:
    return x.reshape(-1, x.shape[-1])
