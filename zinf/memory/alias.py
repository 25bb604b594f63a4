"""One memory for the host and the device copy of an array, on a CPU backend.

Devices of the CPU backend compute in the memory of the host. There a copy from one to
the other would only cost time and room; but an alias shows what is written to the
other, so it is for those who know that neither is written while both are used. (A plan
knows: [Note: shared memory] of `plan.shared`.)
"""

import jax
import numpy as np

from zinf.memory.aligned import ALIGNMENT, address

# Making an alias takes as long as copying so many bytes.
SHARED_FROM_BYTES = 2**18


def device_alias(memory: np.ndarray, device: jax.Device) -> jax.Array | None:
    """`memory` as an array of a device, or None if that would take a copy.

    It stays alive with the result. NumPy gives no read-only memory away.
    """
    if memory.nbytes < SHARED_FROM_BYTES or not has_host_memory(device):
        return None
    if not memory.flags.carray or address(memory) % ALIGNMENT:
        return None
    return exchanged(memory, device)


def host_alias(array: jax.Array) -> np.ndarray | None:
    """An array of one device as a read-only NumPy array, or None likewise."""
    if array.nbytes < SHARED_FROM_BYTES or len(array.devices()) > 1:
        return None
    if not has_host_memory(next(iter(array.devices()))):
        return None
    # An array object of its own: `array` would keep the view for as long as it lives.
    view = np.asarray(jax.block_until_ready(array.addressable_data(0)))
    is_alias = not view.flags.owndata and view.flags.c_contiguous
    return view if is_alias and address(view) % ALIGNMENT == 0 else None


def has_host_memory(device: jax.Device) -> bool:
    return device.platform == "cpu"


def exchanged(memory: np.ndarray, device: jax.Device) -> jax.Array | None:
    """An array of the CPU backend over `memory`, if that can be had by DLPack.

    It lets go of the memory when it is deleted. What `device_put` aliases is let go
    only when JAX is next called, and until then no pool can give it out again.
    """
    is_exchanged = memory.dtype.kind in "fiu" and memory.dtype.isbuiltin == 1
    is_kept = jax.dtypes.canonicalize_dtype(memory.dtype) == memory.dtype
    is_first = device == jax.local_devices(backend="cpu")[0]
    if is_exchanged and is_kept and is_first:
        return jax.dlpack.from_dlpack(memory)
    return None
