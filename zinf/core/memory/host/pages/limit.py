"""How much pinned host memory the devices of this process can use."""

from collections.abc import Sequence
from itertools import product

import jax

from zinf.core.process.started import could_have_read

PINNED = "pinned_host"
# XLA's pool of pinned memory for GPUs. Both are read when the backend starts; a pool
# that is allocated at once is smaller unless the first says otherwise.
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
AT_ONCE_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
POOL_GIB, AT_ONCE_GIB = 64, 16
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
    if devices[0].platform not in ("gpu", "cuda", "rocm"):
        return
    given = could_have_read(POOL_VARIABLE)
    may_be = product(given, could_have_read(AT_ONCE_VARIABLE))
    pool_gib = min(_pool_gib(*values) for values in may_be)
    if needed_bytes <= pool_gib * GIB:
        return
    now, *before = ["not set" if x is None else f"set to {x}" for x in given]
    found = f"{POOL_VARIABLE} is {now}"
    if before:
        found += (
            f" now, but was {before[0]} when Python started, and a backend of jax had "
            "started before zinf saw the change, and may have read the old value"
        )
    raise ValueError(
        f"{asked} needs {needed_bytes:,} bytes of pinned host memory, and XLA's pool "
        f"has {int(pool_gib * GIB):,}: {found}. Set it to "
        f"{-(-needed_bytes // GIB) + 1} before Python starts, because the backend "
        f"reads it when it starts, or use {instead}."
    )


def _pool_gib(given: str | None, at_once: str | None) -> float:
    if given:
        return float(given)
    is_at_once = (at_once or "").lower() in ("1", "true")
    return AT_ONCE_GIB if is_at_once else POOL_GIB
