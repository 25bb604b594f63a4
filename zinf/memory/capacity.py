"""How many bytes a tier has when the user names no budget."""

import os
import shutil
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path

import jax

from zinf.memory.storage_error import StorageError

# XLA's own allocator takes three quarters of an accelerator by default; the rest of
# what the budget leaves is for fragmentation and the runtime.
DEVICE_FRACTION = 0.9
HOST_FRACTION = 0.7
NVME_FRACTION = 0.95


def device_capacity_bytes(device: jax.Device) -> int:
    """Of an accelerator, most of what it reports; of a CPU device, half the memory."""
    stats = device.memory_stats()
    if stats is None:
        return host_memory_bytes() // 2
    return int(stats["bytes_limit"] * DEVICE_FRACTION)


def host_capacity_bytes() -> int:
    return int(host_memory_bytes() * HOST_FRACTION)


def nvme_capacity_bytes(paths: Sequence[Path]) -> int:
    """What the drives behind the folders have free; folders need not exist yet."""
    by_drive = {}
    for path in paths:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        by_drive[existing.stat().st_dev] = shutil.disk_usage(existing).free
    for drive, free in by_drive.items():
        if not free:
            full = ", ".join(str(p) for p in paths)
            raise StorageError(
                ENOSPC,
                f"drive {drive} of memory.nvme has no free bytes; name another folder",
                full,
            )
    return int(sum(by_drive.values()) * NVME_FRACTION)


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
