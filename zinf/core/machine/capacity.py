"""How many bytes a tier has when the user names no budget."""

import shutil
from collections.abc import Iterator, Sequence
from errno import ENOSPC
from pathlib import Path

import jax

from zinf.core.memory.physical import physical_bytes
from zinf.core.memory.storage_error import StorageError

# Fraction of the bytes that XLA's allocator reports, which are three quarters of an
# accelerator's memory by default. The rest is for fragmentation and the runtime.
DEVICE_FRACTION = 0.9
HOST_FRACTION = 0.7
NVME_FRACTION = 0.95

CGROUP_MEMORY = {
    # Control groups of version 2 have one tree; version 1 has one for each controller.
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
    """The budgets of one device and of the host, in bytes.

    A budget that is None is chosen here. An accelerator gets `DEVICE_FRACTION` of the
    bytes that it reports, and the host gets `HOST_FRACTION` of its memory. CPU devices
    use the host's memory: there all devices together get half of that fraction, and the
    host gets the other half. If one budget is given, the other gets what is left. A
    given budget as large as the whole memory was written for another machine, so it is
    not subtracted.

    Args:
        devices: the devices of this process.
        device: the budget that the user asked for each device.
        host: the budget that the user asked for the host.
        num_processes: number of processes of this run on this machine. Each gets an
            equal part of the memory.
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
    """Bytes that a given budget (`taken`) leaves for the tier without a budget."""
    if taken >= memory:
        return int(memory * HOST_FRACTION)
    return max(int(memory * HOST_FRACTION) - taken, (memory - taken) // 2)


def nvme_capacity_bytes(paths: Sequence[Path]) -> int:
    """`NVME_FRACTION` of the free bytes of the drives that the folders are on.

    The folders need not exist yet.
    """
    by_drive = {}
    for path in paths:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if not free:
            raise StorageError(
                ENOSPC,
                "The drive of this memory.nvme folder has no free bytes. Free space "
                "there, or name a folder on another drive",
                str(path),
            )
        by_drive[existing.stat().st_dev] = free
    return int(sum(by_drive.values()) * NVME_FRACTION)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or its container's.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    return min((physical_bytes(), *_cgroup_limits(root)))


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The memory limits of this process's control group and of all groups above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        found = [CGROUP_MEMORY.get(name) for name in controllers.split(",")]
        for mount, name in filter(None, found):
            # The path is the machine's. In a container it may not exist below the
            # mount; the limit of the container is then at the mount itself.
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
