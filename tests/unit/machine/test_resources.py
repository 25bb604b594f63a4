"""What processes plan with: budgets, and rates of a file or what is wrong with it."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.golden import Golden
from zinf.core.config import Config
from zinf.core.machine.rates_file import load_rates, save_rates
from zinf.core.machine.resources import Resources
from zinf.core.plan import Link, Rates
from zinf.core.program import Tier
from zinf.distributed import Alone

HERE = platform.node()
RATES = replace(Rates(), flops_per_second=123.0, overhead_seconds=0.0)


def save(folder: Path, rates: Rates = RATES) -> Path:
    file = folder / "new" / "rates.json"
    save_rates(rates, file, "today, on this")
    return file


class Together(Alone):
    """Process 0 of several; by name, what all of them say."""

    def __init__(self, **said: list) -> None:
        self.said = said

    def gather(self, name, value, timeout=300.0):
        assert json.loads(json.dumps(value)) == value
        others = self.said.get(name, [value] * len(self.said["machines"]))
        return [value, *others[1:]]


def resources(config: dict, *machines: str, **said: list) -> Resources:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    group = Together(machines=list(machines), **said) if machines else Alone()
    return Resources(Config.load(config), mesh, group)


def test_what_is_saved_is_loaded(tmp_path) -> None:
    save(tmp_path, Rates())
    file = save(tmp_path)
    assert load_rates(file) == RATES
    assert json.loads(file.read_text())["measured"] == "today, on this"
    assert [x.name for x in file.parent.iterdir()] == ["rates.json"]


def test_plans_go_by_the_file_of_the_config_and_by_the_slowest(tmp_path) -> None:
    file = save(tmp_path / "here")
    config = {"rates": str(file)}
    assert resources(config).rates == RATES
    links = RATES.link_bytes_per_second | {Link.H2D: 1.0}
    slow = replace(RATES, link_bytes_per_second=links)
    other = json.loads(save(tmp_path / "there", slow).read_text())
    assert resources(config, HERE, HERE, rates=[None, other]).rates == slow


def test_a_file_that_is_not_there_is_asked_for(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot be read.*`zinf bench step`"):
        load_rates(tmp_path / "rates.json")


CHANGES = [
    {"flops_per_second": 0},
    {"flops_per_second": "fast"},
    {"overhead_seconds": -1},
    {"link_bytes_per_second": {"h2d": 1}},
    {"link_bytes_per_second": {"tape": 1}},
    {"update_bytes_per_second": {"host": 1}},
    {"speed": 1},
]


def test_a_damaged_file_says_what_is_wrong(tmp_path, golden: Golden) -> None:
    file = save(tmp_path)
    right, found = json.loads(file.read_text()), []
    for changes in CHANGES:
        file.write_text(json.dumps(right | changes))
        with pytest.raises(ValueError) as caught:
            load_rates(file)
        said = str(caught.value).replace(str(file), "FILE")
        # The address has pydantic's version.
        said = re.sub(r"\n +For further information.*?/v/\w+", "", said)
        found.append(f"{changes}\n{said}")
    golden.check("damaged_rates.txt", "\n".join(found))


@pytest.mark.parametrize("others", [0, 3])
def test_processes_on_one_machine_share_memory_and_drives(tmp_path, others):
    config = {"memory": {"nvme": [str(tmp_path)]}}
    alone = resources(config, HERE, "elsewhere").capacity
    shared = resources(config, HERE, "elsewhere", *[HERE] * others).capacity
    for tier in (Tier.DEVICE, Tier.HOST):
        assert shared[tier] == pytest.approx(alone[tier] / (1 + others), abs=2)
    # What is free on a drive changes while this runs.
    assert shared[Tier.NVME] == pytest.approx(alone[Tier.NVME] / (1 + others), rel=0.05)


def test_a_budget_that_is_given_is_that_of_each_process(tmp_path):
    memory = {"device": 5000, "host": 6000, "nvme_capacity": 7000}
    config = {"memory": {**memory, "nvme": [str(tmp_path)]}}
    found = resources(config, *[HERE] * 4).capacity
    assert found == {Tier.DEVICE: 5000, Tier.HOST: 6000, Tier.NVME: 7000}
