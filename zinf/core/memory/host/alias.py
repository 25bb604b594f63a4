"""One memory for the host and the device copy of an array, on a CPU backend.

Devices of the CPU backend compute in host memory. There a copy between the two tiers
only costs time and memory. But a write to one alias changes the other, so aliases are
only for callers who know that neither is written while both are in use. (A plan knows:
[Note: shared memory] of `plan.shared`.)
"""

import jax
import numpy as np

from zinf.core.memory.host.aligned import ALIGNMENT, address

# Making an alias takes as long as copying this many bytes.
SHARED_FROM_BYTES = 2**18


def device_alias(memory: np.ndarray, device: jax.Device) -> jax.Array | None:
    """`memory` as an array on `device`, or None if that needs a copy.

    The result keeps `memory` alive. Read-only memory needs a copy: NumPy does not
    export it.
    """
    if memory.nbytes < SHARED_FROM_BYTES or not has_host_memory(device):
        return None
    if not memory.flags.carray or address(memory) % ALIGNMENT:
        return None
    return exchanged(memory, device)


def host_alias(array: jax.Array) -> np.ndarray | None:
    """An array on one device as a read-only NumPy array; None if that needs a copy."""
    if array.nbytes < SHARED_FROM_BYTES or len(array.devices()) > 1:
        return None
    if not has_host_memory(next(iter(array.devices()))):
        return None
    # From another array object: `array` would keep the view as long as it lives itself.
    view = np.asarray(jax.block_until_ready(array.addressable_data(0)))
    is_alias = not view.flags.owndata and view.flags.c_contiguous
    return view if is_alias and address(view) % ALIGNMENT == 0 else None


def has_host_memory(device: jax.Device) -> bool:
    return device.platform == "cpu"


def exchanged(memory: np.ndarray, device: jax.Device) -> jax.Array | None:
    """An array of the CPU backend over `memory`, or None if DLPack cannot make one.

    It stops referring to the memory as soon as it is deleted. An alias that
    `device_put` makes does so only when JAX is next called, and until then the pool
    cannot reuse the memory.
    """
    is_exchanged = memory.dtype.kind in "fiu" and memory.dtype.isbuiltin == 1
    is_kept = jax.dtypes.canonicalize_dtype(memory.dtype) == memory.dtype
    is_first = device == jax.local_devices(backend="cpu")[0]
    if is_exchanged and is_kept and is_first:
        return jax.dlpack.from_dlpack(memory)
    return None
