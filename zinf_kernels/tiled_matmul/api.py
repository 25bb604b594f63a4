"""`matmul`: signature, checks, gradients and choice of implementation."""

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf_kernels.device import Device, device_for, hopper_obstacle
from zinf_kernels.dispatch import Implementation, choose_name
from zinf_kernels.tiled_matmul.epilogue import ACTIVATIONS, Epilogue
from zinf_kernels.tiled_matmul.gradients import gradients
from zinf_kernels.tiles import TILES

EXISTING = ("mosaic_gpu", "reference")
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16)


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    activation: str | None = None,
    residual: Float[Array, "m n"] | None = None,
    out_dtype: Any = None,
    implementation: Implementation = None,
) -> Float[Array, "m n"]:
    """activation(a @ b + bias) + residual, rounded once at the end.

    The product is summed in float32 (float64 of float64) and never rounded before the
    end. To add a product to a sum of gradients in float32, pass the sum as `residual`
    and float32 as `out_dtype`.

    Differentiable in reverse: by XLA, which computes a @ b again if there is an
    activation. The gradient by the product is rounded to the dtype of `a` before it is
    multiplied; those by `a` and `b` are summed in float32 and rounded once.

    Under `jax.jit` with several devices call it in `jax.shard_map`: XLA does not cut
    kernels.

    Args:
        a: float32, bfloat16, float16 or float64; the kernel takes the short ones.
        b: of the dtype of `a`.
        bias: any floating dtype.
        activation: "relu", "gelu" (by tanh) or "silu".
        residual: any floating dtype; for the kernel float32, or that of `a`.
        out_dtype: of the result, by default that of `a`.
        implementation: "mosaic_gpu", "reference", or names in order of preference.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the implementation cannot
            run: see `obstacles`.
    """
    epilogue = Epilogue(
        activation, jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    )
    _check(a, b, bias, residual, epilogue)
    device = device_for(a, b)
    why_not = obstacles(device, a=a, b=b, residual=residual, out_dtype=epilogue.dtype)
    name = choose_name(
        implementation, op="matmul", existing=EXISTING, obstacles=why_not
    )
    return _matmul(a, b, bias, residual, name, epilogue, device.num_cores)


def obstacles(
    device: Device, *, a: Any, b: Any, residual: Any = None, out_dtype: Any = None
) -> dict[str, str]:
    """Why the implementations that cannot run there on such arrays cannot.

    `implementation=None` takes the first of `EXISTING` that is not here.
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


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _matmul(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    name: str,
    epilogue: Epilogue,
    num_cores: int,
) -> Array:
    # Only now: importing Pallas takes 1.4 s, and most will never need it.
    backend = import_module(f"zinf_kernels.tiled_matmul.{name}")
    bias = (
        None if bias is None else bias.astype(jnp.promote_types(a.dtype, jnp.float32))
    )
    return backend.matmul(a, b, bias, residual, epilogue=epilogue, num_cores=num_cores)


def _forward(*arguments: Any) -> Any:
    return _matmul(*arguments), arguments[:4]


def _backward(name: str, epilogue: Epilogue, cores: int, kept: Any, by: Any) -> Any:
    del name, cores
    a, b, bias, residual = kept
    return gradients(a, b, bias, residual, by, epilogue=epilogue)


_matmul.defvjp(_forward, _backward)


def _check(a: Any, b: Any, bias: Any, residual: Any, epilogue: Epilogue) -> None:
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    for name, x in given.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}. Convert it to a floating dtype.")
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b {b.dtype}. Convert both to one dtype.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {a.shape} and b {b.shape}: no product of matrices."
        )
    shape = a.shape[0], b.shape[1]
    if bias is not None and bias.shape != shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {shape[1:]}.")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {residual.shape}, not {shape}.")
    if epilogue.activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"activation is {epilogue.activation!r}. Pass None or one of "
            f"{', '.join(map(repr, ACTIVATIONS))}."
        )
    if not jnp.issubdtype(epilogue.dtype, jnp.floating):
        raise ValueError(f"out_dtype is {epilogue.dtype}. Pass a floating dtype.")
