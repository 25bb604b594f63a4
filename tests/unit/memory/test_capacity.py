"""Budgets that are chosen where the user names none."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from zinf.memory import capacity
from zinf.memory.capacity import (
    DEVICE_FRACTION,
    HOST_FRACTION,
    host_memory_bytes,
    memory_budgets,
    nvme_capacity_bytes,
)
from zinf.memory.storage_error import StorageError

GIB = 1 << 30
MEMORY = 16 * GIB
ROOM = int(MEMORY * HOST_FRACTION)


@dataclass(frozen=True)
class FakeDevice:
    """A device that reports `bytes_limit`, or nothing, as CPU devices do."""

    bytes_limit: int | None = None

    def memory_stats(self):
        return self.bytes_limit and {"bytes_limit": self.bytes_limit}


CPU = FakeDevice()


@pytest.fixture
def machine(monkeypatch):
    """A machine with `MEMORY` bytes of memory."""
    monkeypatch.setattr(capacity, "host_memory_bytes", lambda: MEMORY)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.usefixtures("machine")
def test_cpu_devices_and_the_host_share_a_fraction_of_one_memory(count):
    device, host = memory_budgets([CPU] * count, device=None, host=None)
    assert (device, host) == (ROOM // 2 // count, ROOM // 2)
    assert count * device + host <= HOST_FRACTION * MEMORY


@pytest.mark.parametrize("given", [GIB, 8 * GIB, 11 * GIB, 15 * GIB])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.usefixtures("machine")
def test_on_a_cpu_the_tier_without_a_budget_gets_what_the_other_leaves(tier, given):
    asked = {"device": None, "host": None, tier: given}
    budgets = memory_budgets([CPU], **asked)
    chosen = budgets[tier == "device"]
    assert budgets[tier == "host"] == given
    assert chosen == max(ROOM - given, (MEMORY - given) // 2)
    assert sum(budgets) <= MEMORY


@pytest.mark.usefixtures("machine")
def test_a_device_larger_than_the_memory_is_another_machine_s():
    assert memory_budgets([CPU], device=120 * GIB, host=None) == (120 * GIB, ROOM)
    assert memory_budgets([CPU], device=None, host=99 * GIB) == (ROOM, 99 * GIB)


@pytest.mark.usefixtures("machine")
def test_an_accelerator_has_memory_of_its_own():
    devices = [FakeDevice(40 * GIB), FakeDevice(80 * GIB)]
    device, host = memory_budgets(devices, device=None, host=None)
    assert (device, host) == (int(40 * GIB * DEVICE_FRACTION), ROOM)
    assert memory_budgets(devices, device=GIB, host=None) == (GIB, ROOM)


@pytest.mark.usefixtures("machine")
def test_processes_on_one_machine_share_its_memory():
    asked = {"device": None, "host": None, "num_processes": 4}
    device, host = memory_budgets([CPU, CPU], **asked)
    assert 4 * (2 * device + host) <= HOST_FRACTION * MEMORY
    assert host == ROOM // 4 // 2
    device, host = memory_budgets([FakeDevice(40 * GIB)], **asked)
    assert (device, host) == (int(40 * GIB * DEVICE_FRACTION), ROOM // 4)


LIMIT = 300 << 20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
SERVICE = "system.slice/train.service"


@pytest.mark.parametrize(
    ("group", "files"),
    [
        # Version 2, as a container sees it: its own group is the root.
        ("0::/", {f"{V2}/memory.max": LIMIT}),
        (f"0::/{SERVICE}", {f"{V2}/{SERVICE}/memory.max": LIMIT}),
        # The limit is that of a group above.
        (
            f"0::/{SERVICE}",
            {
                f"{V2}/{SERVICE}/memory.max": "max",
                f"{V2}/system.slice/memory.max": LIMIT,
            },
        ),
        # Version 1, where a container sees the machine's path and its own mount.
        (
            "11:cpu,cpuacct:/docker/1f\n7:memory:/docker/1f",
            {f"{V1}/memory.limit_in_bytes": LIMIT},
        ),
        (
            "7:memory:/job",
            {
                f"{V1}/job/memory.limit_in_bytes": LIMIT,
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
            },
        ),
    ],
)
def test_a_container_s_limit_is_its_memory(tmp_path: Path, group, files):
    write(tmp_path / "proc/self/cgroup", group)
    for name, limit in files.items():
        write(tmp_path / name, limit)
    assert host_memory_bytes(tmp_path) == LIMIT


@pytest.mark.parametrize("limit", ["max", 9223372036854771712])
def test_without_a_limit_the_memory_is_the_machine_s(tmp_path: Path, limit):
    physical = host_memory_bytes(tmp_path)
    write(tmp_path / "proc/self/cgroup", "0::/job")
    write(tmp_path / V2 / "job/memory.max", limit)
    assert host_memory_bytes(tmp_path) == physical > LIMIT


def write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n")


def test_a_full_drive_is_an_error_that_names_its_folder(monkeypatch, tmp_path) -> None:
    good, full = tmp_path / "good", tmp_path / "full"
    good.mkdir()
    full.mkdir()
    monkeypatch.setattr(
        capacity.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=0 if path == full else GIB),
    )
    with pytest.raises(StorageError, match="no free bytes") as caught:
        nvme_capacity_bytes([good, full])
    assert caught.value.filename == str(full)
