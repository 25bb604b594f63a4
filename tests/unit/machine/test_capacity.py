"""Budgets that are chosen where the user names none."""

from types import SimpleNamespace

import pytest

from zinf.core.machine import capacity
from zinf.core.machine.capacity import (
    DEVICE_FRACTION,
    HOST_FRACTION,
    NVME_FRACTION,
    host_memory_bytes,
    memory_budgets,
    nvme_capacity_bytes,
)
from zinf.core.memory.storage_error import StorageError

GIB = 1 << 30
MEMORY = 16 * GIB
ROOM = int(MEMORY * HOST_FRACTION)


def device(bytes_limit=None):
    """A device that reports `bytes_limit`, or nothing, as CPU devices do."""
    stats = bytes_limit and {"bytes_limit": bytes_limit}
    return SimpleNamespace(memory_stats=lambda: stats)


CPU, GPU = device(), device(40 * GIB)
ON_GPU = int(40 * GIB * DEVICE_FRACTION)


@pytest.mark.parametrize(
    ("devices", "device", "host", "num_processes", "expected"),
    [
        # CPU devices and the host share a fraction of one memory.
        ([CPU] * 8, None, None, 1, (ROOM // 16, ROOM // 2)),
        # Beside a budget: what is left of the fraction, or half of what is left at all.
        ([CPU], GIB, None, 1, (GIB, ROOM - GIB)),
        ([CPU] * 2, 4 * GIB, None, 1, (4 * GIB, 8 * GIB // 2)),
        ([CPU], None, GIB, 1, (ROOM - GIB, GIB)),
        ([CPU] * 2, None, 15 * GIB, 1, (GIB // 4, 15 * GIB)),
        ([CPU], GIB, 99 * GIB, 1, (GIB, 99 * GIB)),
        # A device as large as the memory is another machine's.
        ([CPU], MEMORY - 1, None, 1, (MEMORY - 1, 0)),
        ([CPU], MEMORY, None, 1, (MEMORY, ROOM)),
        # An accelerator has memory of its own; the smallest counts.
        ([GPU, device(80 * GIB)], None, None, 1, (ON_GPU, ROOM)),
        ([GPU], GIB, None, 1, (GIB, ROOM)),
        ([GPU], None, GIB, 1, (ON_GPU, GIB)),
        # Processes on one machine share its memory.
        ([CPU, CPU], None, None, 4, (ROOM // 16, ROOM // 8)),
        ([GPU], None, None, 4, (ON_GPU, ROOM // 4)),
    ],
)
def test_a_budget_that_is_not_named_is_what_the_other_leaves_of_a_fraction(
    devices, device, host, num_processes, expected, monkeypatch
):
    monkeypatch.setattr(capacity, "host_memory_bytes", lambda: MEMORY)
    asked = {"device": device, "host": host, "num_processes": num_processes}
    assert memory_budgets(devices, **asked) == expected


LIMIT, MORE = 300 << 20, 9223372036854771712
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
SERVICE = "system.slice/train.service"
V1_LIMIT = "memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("group", "files", "is_limited"),
    [
        # Version 2, as a container sees it: its own group is the root.
        ("0::/", {f"{V2}/memory.max": LIMIT}, True),
        # The limit is that of a group above.
        (
            f"0::/{SERVICE}",
            {
                f"{V2}/{SERVICE}/memory.max": "max",
                f"{V2}/system.slice/memory.max": LIMIT,
            },
            True,
        ),
        # Version 1, where a container sees the machine's path and its own mount.
        (
            "11:cpu,cpuacct:/docker/1f\n7:memory:/docker/1f",
            {f"{V1}/{V1_LIMIT}": LIMIT},
            True,
        ),
        (
            "7:memory:/job",
            {f"{V1}/job/{V1_LIMIT}": LIMIT, f"{V1}/{V1_LIMIT}": MORE},
            True,
        ),
        ("0::/job", {f"{V2}/job/memory.max": "max"}, False),
        ("0::/job", {f"{V2}/job/memory.max": MORE}, False),
        ("0::/job", {"sys/fs/memory.max": LIMIT}, False),  # above the mount
    ],
)
def test_a_container_s_limit_is_its_memory(tmp_path, group, files, is_limited):
    physical = host_memory_bytes(tmp_path)
    for name, content in {"proc/self/cgroup": group, **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    assert host_memory_bytes(tmp_path) == (LIMIT if is_limited else physical)
    assert physical > LIMIT


def test_a_drive_counts_once_and_a_full_one_is_named(monkeypatch, tmp_path):
    good, full = tmp_path / "good", tmp_path / "full"
    good.mkdir()
    full.mkdir()
    monkeypatch.setattr(
        capacity.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=0 if path == full else GIB),
    )
    folders = [good, good / "not" / "yet"]
    assert nvme_capacity_bytes(folders) == int(NVME_FRACTION * GIB)
    with pytest.raises(StorageError, match="no free bytes") as caught:
        nvme_capacity_bytes([good, full])
    assert caught.value.filename == str(full)
