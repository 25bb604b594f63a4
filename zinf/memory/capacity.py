"""How many bytes a tier has when the user names no budget."""

import shutil
from collections.abc import Iterator, Sequence
from errno import ENOSPC
from pathlib import Path

import jax

from zinf.memory.physical import physical_bytes
from zinf.memory.storage_error import StorageError

# XLA's own allocator takes three quarters of an accelerator by default; the rest of
# what the budget leaves is for fragmentation and the runtime.
DEVICE_FRACTION = 0.9
HOST_FRACTION = 0.7
NVME_FRACTION = 0.95

CGROUP_MEMORY = {
    # Control groups of version 2 have one tree; of version 1, one for each controller.
    "": (Path("sys/fs/cgroup"), "memory.max"),
    "memory": (Path("sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


def memory_budgets(
    devices: Sequence[jax.Device],
    *,
    device: int | None,
    host: int | None,
    num_processes: int = 1,
) -> tuple[int, int]:
    """The budgets of one device and of the host, in bytes; None is chosen here.

    An accelerator's budget is most of what the device reports, and the host's is
    `HOST_FRACTION` of the memory. CPU devices lie in the host's memory: there all
    devices together and the host have half of that fraction each, or what a given
    budget leaves. A given budget of the whole memory or more is another machine's, and
    takes nothing here.

    Args:
        devices: those of this process.
        device: the budget asked for each of them.
        host: the budget asked for the host.
        num_processes: those of the run on this machine, each with an equal part.
    """
    if device is not None and host is not None:
        return device, host
    memory = host_memory_bytes() // num_processes
    room = int(memory * HOST_FRACTION)
    stats = [one.memory_stats() for one in devices]
    reported = [each["bytes_limit"] for each in stats if each is not None]
    if len(reported) == len(stats):
        if device is None:
            device = int(min(reported) * DEVICE_FRACTION)
        return device, room if host is None else host
    if device is None:
        left = room // 2 if host is None else _beside(host, memory)
        device = left // len(devices)
    elif host is None:
        return device, _beside(device * len(devices), memory)
    return device, room // 2 if host is None else host


def _beside(taken: int, memory: int) -> int:
    """What a budget leaves of the memory, for the tier that has none."""
    if taken >= memory:
        return int(memory * HOST_FRACTION)
    return max(int(memory * HOST_FRACTION) - taken, (memory - taken) // 2)


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


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may have in memory: the machine's, or its container's.

    Args:
        root: where `proc` and `sys` are.
    """
    return min((physical_bytes(), *_cgroup_limits(root)))


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The memory limits of this process's control group and of all groups above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        found = [CGROUP_MEMORY.get(name) for name in controllers.split(",")]
        for mount, name in filter(None, found):
            # A container may see its own limit at the mount and not below it, where
            # the path, which is the machine's, says.
            group = root / mount / path.lstrip("/")
            for folder in (group, *group.parents):
                limit = _text(folder / name).strip()
                if limit.isdecimal():  # "max" is no limit
                    yield int(limit)
                if folder == root / mount:
                    break


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no Linux, no such controller, or not allowed to look
        return ""
