"""The budgets and rates that plans are made with."""

import platform
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.machine.capacity import (
    DEVICE_FRACTION,
    HOST_FRACTION,
    host_memory_bytes,
    memory_budgets,
    nvme_capacity_bytes,
)
from zinf.core.machine.rates_file import RatesFile, load_rates
from zinf.core.memory.nvme import measured_speeds
from zinf.core.plan import Link, Rates, accelerator_rates, slowest_rates
from zinf.core.program import Tier
from zinf.core.sharding.mesh import local_devices
from zinf.core.topology import Topology
from zinf.distributed import AbstractGroup

# Assumed share of a peak rate that a machine attains.
ATTAINED = 0.5


@dataclass(frozen=True)
class Resources:
    """The budgets and rates of each device of a mesh and of each process.

    Processes may find different budgets and rates. All plan with the lowest, because
    their plans must be the same.
    """

    config: Config
    mesh: Mesh
    group: AbstractGroup
    topology: Topology | None = None

    @cached_property
    def capacity(self) -> dict[Tier, int]:
        """Budgets in bytes: of one device, and of one process on host and nvme."""
        found = self.group.gather("budgets", self._own_capacity())
        return {tier: min(own[tier] for own in found) for tier in Tier}

    @cached_property
    def rates(self) -> Rates:
        """The rates to plan with before any are measured.

        If the devices are CPUs and the device budget exceeds the memory of this
        machine, the plan is for another machine: rates of an accelerator are used.
        """
        if self.topology is not None:
            return _rates_of(self.topology)
        if isinstance(self.config.rates, Path):
            return self.slowest(load_rates(self.config.rates))
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        device_bytes = self.config.device_bytes or 0
        is_elsewhere = is_cpu and device_bytes > host_memory_bytes()
        rates = Rates() if is_cpu and not is_elsewhere else accelerator_rates()
        speeds = self._drive_speeds()
        return rates if is_elsewhere or speeds is None else rates.on_drive(*speeds)

    def _own_capacity(self) -> dict[Tier, int]:
        config = self.config
        asked = {tier: attrgetter(tier.row.budget)(config) for tier in Tier}
        device, host = asked[Tier.DEVICE], asked[Tier.HOST]
        if self.topology is not None:
            chip, count = self.topology.chip, self.topology.devices_per_host
            device = device or int(chip.memory_bytes * DEVICE_FRACTION)
            host = host or int(count * chip.host_memory_bytes * HOST_FRACTION)
            asked[Tier.NVME] = asked[Tier.NVME] or sys.maxsize
        count = self._processes_here
        devices = local_devices(self.mesh)
        device, host = memory_budgets(
            devices, device=device, host=host, num_processes=count
        )
        paths = config.nvme_paths
        if not paths:
            asked[Tier.NVME] = 0
        elif asked[Tier.NVME] is None:
            asked[Tier.NVME] = nvme_capacity_bytes(paths) // count
        # A tier in files that the config does not name does not exist.
        given = {tier: nbytes or 0 for tier, nbytes in asked.items()}
        return given | {Tier.DEVICE: device, Tier.HOST: host}

    @cached_property
    def _processes_here(self) -> int:
        """Processes of the group on this machine, which share its memory and drives."""
        return self.group.gather("machines", platform.node()).count(platform.node())

    def slowest(self, own: Rates) -> Rates:
        """The lowest of each rate, over the measured rates of all processes."""
        file = RatesFile.of(own, "").model_dump(mode="json")
        found = self.group.gather("rates", file)
        return slowest_rates([RatesFile(**each).rates for each in found])

    def _drive_speeds(self) -> tuple[float, float] | None:
        """Measured read and write bytes per second, of the slowest process."""
        measured = measured_speeds(self.config.nvme_paths)
        speeds = self.group.gather("drive speeds", measured and list(measured))
        if None in speeds:
            return None
        reads, writes = zip(*speeds, strict=True)
        return min(reads), min(writes)


def _rates_of(topology: Topology) -> Rates:
    """The rates of a machine, assumed to be `ATTAINED` times their peaks.

    A link has the rate of all devices of a host together, which is that of a process.
    """
    chip, count = topology.chip, topology.devices_per_host
    usual = accelerator_rates()
    host_link = count * chip.host_link_bytes_per_second * ATTAINED
    updates = {
        # Half, because an update reads about as many bytes as it writes.
        Tier.DEVICE: chip.memory_bytes_per_second * ATTAINED / 2,
        Tier.HOST: usual.update_bytes_per_second[Tier.HOST],
    }
    links = {Link.H2D: host_link, Link.D2H: host_link}
    return replace(
        usual,
        link_bytes_per_second=usual.link_bytes_per_second | links,
        flops_per_second=chip.flops_per_second * ATTAINED,
        update_bytes_per_second=updates,
        exchange_bytes_per_second=topology.link_bytes_per_second * ATTAINED,
    )
