"""What several processes have to plan with."""

import platform

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from zinf.config import Config
from zinf.distributed import Alone
from zinf.prepare.resources import Resources
from zinf.program import Tier


class Together(Alone):
    """Process 0 of several, each on the machine of that name; all find the same."""

    def __init__(self, *machines: str) -> None:
        self.machines = list(machines)

    def gather(self, name, value, timeout=300.0):
        return self.machines if name == "machines" else [value] * len(self.machines)


def capacity(config, *machines: str) -> dict[Tier, int]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    return Resources(Config.load(config), mesh, Together(*machines)).capacity


@pytest.mark.parametrize("others", [0, 3])
def test_processes_on_one_machine_share_memory_and_drives(tmp_path, others):
    config = {"memory": {"nvme": [str(tmp_path)]}}
    here = platform.node()
    alone = capacity(config, here, "elsewhere")
    shared = capacity(config, here, "elsewhere", *[here] * others)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert shared[tier] == pytest.approx(alone[tier] / (1 + others), abs=2)
    # What is free on a drive changes while this runs.
    assert shared[Tier.NVME] == pytest.approx(alone[Tier.NVME] / (1 + others), rel=0.05)


def test_a_budget_that_is_given_is_that_of_each_process(tmp_path):
    memory = {"device": 5000, "host": 6000, "nvme_capacity": 7000}
    here = [platform.node()] * 4
    found = capacity({"memory": {**memory, "nvme": [str(tmp_path)]}}, *here)
    assert found == {Tier.DEVICE: 5000, Tier.HOST: 6000, Tier.NVME: 7000}
