"""`adam_update` on the device: signature, checks and choice of implementation."""

from importlib import import_module
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from zinf_kernels.adam.arguments import DTYPES, Scalars
from zinf_kernels.device import Device, device_for, hopper_obstacle
from zinf_kernels.dispatch import Implementation, choose_name

EXISTING = ("mosaic_gpu", "reference")
# In this order the implementations get them, as one array.
NAMES = tuple(Scalars.__dataclass_fields__)


class Updated(NamedTuple):
    """The arrays after an update; `copy` is None unless one was asked for."""

    master: Float32[Array, "..."]
    m: Float[Array, "..."]
    v: Float32[Array, "..."]
    copy: Float[Array, "..."] | None


def adam_update(
    master: Float32[Array, "..."],
    m: Float[Array, "..."],
    v: Float32[Array, "..."],
    gradient: Float[Array, "..."],
    *,
    scalars: Scalars,
    copy_dtype: Any = None,
    implementation: Implementation = None,
) -> Updated:
    """One step of Adam or AdamW on arrays on the device.

    Formulas, dtypes and the bounds of rounding are those of
    `zinf_kernels.adam_update`, which does the same in host memory; so are what becomes
    of results below 2**-126, of infinities and of NaNs.

    The kernel reads and writes each array once. Its results are new arrays: it does not
    reuse memory that is donated.

    Args:
        master: float32 parameters, of any shape, which the others share. The kernel
            makes copies unless the size is a multiple of 1024 (`TILE_NUMEL`).
        m: average of gradients, float32 or bfloat16.
        v: average of squared gradients, float32.
        gradient: float32, bfloat16 or float16.
        scalars: from `zinf_kernels.adam.adam_scalars`, or with fields that are traced:
            no value of theirs makes a new program.
        copy_dtype: bfloat16 or float16 for a copy of the new parameters.
        implementation: "mosaic_gpu", "reference", or names in order of preference.

    Raises:
        ValueError: a shape or dtype is wrong, or the implementation cannot run: see
            `obstacles`.
    """
    arrays = {"master": master, "m": m, "v": v, "gradient": gradient}
    _check(arrays, copy_dtype)
    device = device_for(*arrays.values())
    name = choose_name(
        implementation,
        op="adam_update",
        existing=EXISTING,
        obstacles=obstacles(device, numel=master.size),
    )
    backend = import_module(f"zinf_kernels.adam_on_device.{name}")
    numbers = [jnp.asarray(getattr(scalars, name), jnp.float32) for name in NAMES]
    copy_dtype = None if copy_dtype is None else jnp.dtype(copy_dtype)
    flat = [a.reshape(-1) for a in arrays.values()]
    new, new_m, new_v, copy = backend.adam_update(
        *flat, jnp.stack(numbers), copy_dtype=copy_dtype, num_cores=device.num_cores
    )
    new, new_m, new_v = (a.reshape(master.shape) for a in (new, new_m, new_v))
    copy = None if copy is None else copy.reshape(master.shape)
    return Updated(new, new_m, new_v, copy)


def obstacles(device: Device, *, numel: int = 1) -> dict[str, str]:
    """Why the implementations that cannot run there on so many elements cannot.

    `implementation=None` takes the first of `EXISTING` that is not here.
    """
    found = hopper_obstacle(device)
    if found is None and not numel:
        found = "there is nothing to do for empty arrays."
    return {} if found is None else {"mosaic_gpu": found}


def _check(arrays: dict[str, Any], copy_dtype: Any) -> None:
    shape = arrays["master"].shape
    dtypes = {name: array.dtype for name, array in arrays.items()}
    if copy_dtype is not None:
        dtypes["copy"] = jnp.dtype(copy_dtype)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES[name]:
            allowed = " or ".join(map(str, DTYPES[name]))
            raise ValueError(f"{name} is {dtype}, not {allowed}. Convert it before.")
    for name, array in arrays.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape} and master {shape}. Give all arrays "
                "the same shape."
            )
