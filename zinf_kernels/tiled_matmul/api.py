"""`matmul`: signature, checks, gradients and choice of implementation."""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf_kernels.device import Device, device_for, hopper_obstacle
from zinf_kernels.dispatch import Implementation, choose_name
from zinf_kernels.pieces import accumulator, varying_as
from zinf_kernels.tiled_matmul.gradients import gradients
from zinf_kernels.tiles import TILES

EXISTING = ("mosaic_gpu", "reference")
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class _Call:
    """The static arguments of a call, for its forward and backward pass."""

    implementation: str
    dtype: Any
    has_bias: bool
    residual_dtype: Any  # None without a residual
    num_cores: int


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "m n"] | None = None,
    out_dtype: Any = None,
    implementation: Implementation = None,
) -> Float[Array, "m n"]:
    """a @ b + bias + residual, rounded once at the end.

    The matmul is summed in float32 (float64 of float64) and never rounded before the
    end. To add a matmul to a sum in float32, pass the sum as `residual` and float32 as
    `out_dtype`.

    Differentiable in reverse: by XLA, from `a` and `b` alone. The gradient by the
    matmul is rounded to the dtype of `a` before it is multiplied; those by `a` and `b`
    are summed in float32 and rounded once.

    Under `jax.jit` with several devices call it in `jax.shard_map`: XLA does not cut
    kernels. There an array may be the same on all devices: its gradient is then summed
    over them.

    Args:
        a: float32, bfloat16, float16 or float64; the kernel takes the short ones.
        b: of the dtype of `a`.
        bias: any floating dtype.
        residual: any floating dtype; for the kernel float32, or that of `a`.
        out_dtype: of the result, by default that of `a`.
        implementation: "mosaic_gpu", "reference", or names in order of preference.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the implementation cannot
            run: see `obstacles`.
    """
    dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    _check(a, b, bias, residual, dtype)
    device = device_for(a, b)
    why_not = obstacles(device, a=a, b=b, residual=residual, out_dtype=dtype)
    name = choose_name(
        implementation, op="matmul", existing=EXISTING, obstacles=why_not
    )
    residual_dtype = None if residual is None else residual.dtype
    call = _Call(name, dtype, bias is not None, residual_dtype, device.num_cores)
    bias = None if bias is None else bias.astype(accumulator(a.dtype))
    arrays = a, b, bias, residual
    given = [x for x in arrays if x is not None]
    return _matmul(
        *(None if x is None else varying_as(x, *given) for x in arrays), call
    )


def obstacles(
    device: Device, *, a: Any, b: Any, residual: Any = None, out_dtype: Any = None
) -> dict[str, str]:
    """For each implementation that cannot run there on such arrays, the reason.

    `implementation=None` takes the first of `EXISTING` that is not among them.
    """
    found = hopper_obstacle(device)
    if found is None and a.dtype not in KERNEL_DTYPES:
        found = f"its matrices are bfloat16 or float16, not {a.dtype}."
    outer = [a.dtype if out_dtype is None else jnp.dtype(out_dtype)]
    outer += [] if residual is None else [residual.dtype]
    for dtype in outer:
        if found is None and dtype not in (a.dtype, jnp.float32):
            found = f"residual and result are {a.dtype} or float32, not {dtype}."
    if found is None:
        found = TILES.obstacle(a.shape[0], b.shape[1], a.shape[1])
    return {} if found is None else {"mosaic_gpu": found}


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(
    a: Array, b: Array, bias: Array | None, residual: Array | None, call: _Call
) -> Array:
    # Imported late: Pallas takes 1.4 s to import, and most programs never need it.
    backend = import_module(f"zinf_kernels.tiled_matmul.{call.implementation}")
    return backend.matmul(
        a, b, bias, residual, out_dtype=call.dtype, num_cores=call.num_cores
    )


def _forward(
    a: Array, b: Array, bias: Array | None, residual: Array | None, call: _Call
) -> Any:
    return _matmul(a, b, bias, residual, call), (a, b)


def _backward(call: _Call, kept: Any, by_result: Array) -> Any:
    a, b = kept
    by_a, by_b, by_bias = gradients(a, b, by_result)
    residual_dtype = call.residual_dtype
    return (
        by_a,
        by_b,
        by_bias if call.has_bias else None,
        None if residual_dtype is None else by_result.astype(residual_dtype),
    )


_matmul.defvjp(_forward, _backward)


def _check(a: Any, b: Any, bias: Any, residual: Any, dtype: Any) -> None:
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    for name, x in given.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}. Convert it to a floating dtype.")
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b {b.dtype}. Convert both to one dtype.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {a.shape} and b {b.shape}: their matmul does not exist."
        )
    shape = a.shape[0], b.shape[1]
    if bias is not None and bias.shape != shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {shape[1:]}.")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {residual.shape}, not {shape}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype is {dtype}. Pass a floating dtype.")
