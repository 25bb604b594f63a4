"""How much pinned host memory the devices of this process can use."""

import os
from collections.abc import Sequence

import jax

PINNED = "pinned_host"
# XLA's pool of pinned memory for GPUs. It is read when the backend starts.
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
POOL_GIB = 64
GIB = 2**30


def check_pinned(
    devices: Sequence[jax.Device],
    needed_bytes: int,
    *,
    asked: str = "execution: offloaded",
    instead: str = "execution: streamed",
) -> None:
    """Raise unless the devices can use so much pinned host memory of this process.

    Args:
        asked, instead: the setting that needs it, and one that does not.

    Raises:
        NotImplementedError: a device has no pinned host memory.
        ValueError: it is more than the pool that XLA has for GPUs.
    """
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED not in kinds:
            raise NotImplementedError(
                f"{asked} needs memory of the kind {PINNED}, and {device} has "
                f"{', '.join(kinds) or 'no memories'}. Use {instead}."
            )
    given = os.environ.get(POOL_VARIABLE)
    pool_bytes = (float(given) if given else POOL_GIB) * GIB
    if devices[0].platform in ("gpu", "cuda", "rocm") and needed_bytes > pool_bytes:
        found = f"set to {given}" if given else "not set"
        raise ValueError(
            f"{asked} needs {needed_bytes:,} bytes of pinned host memory, and XLA's "
            f"pool has {int(pool_bytes):,}: {POOL_VARIABLE} is {found}. Set it to "
            f"{-(-needed_bytes // GIB) + 1} before Python starts, because the backend "
            f"read it when it started, or use {instead}."
        )
