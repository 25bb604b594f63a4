"""Files of rates come back as they were, or say what is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.golden import Golden
from zinf.config import Config
from zinf.distributed import Alone
from zinf.plan import Link, Rates
from zinf.prepare.rates_file import load_rates, save_rates
from zinf.prepare.resources import Resources

RATES = replace(Rates(), flops_per_second=123.0, overhead_seconds=0.0)


class Pair(Alone):
    """Two processes, the other of which measured `other`."""

    def __init__(self, other: object) -> None:
        self.other = other

    def gather(self, name, value, timeout=300.0):
        assert json.loads(json.dumps(value)) == value
        return [value, self.other]


def save(folder: Path, rates: Rates = RATES) -> Path:
    file = folder / "new" / "rates.json"
    save_rates(rates, file, "today, on this")
    return file


def resources(file: Path, group: Alone) -> Resources:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return Resources(Config.load({"rates": str(file)}), mesh, group)


def test_what_is_saved_is_loaded(tmp_path) -> None:
    save(tmp_path, Rates())
    file = save(tmp_path)
    assert load_rates(file) == RATES
    assert json.loads(file.read_text())["measured"] == "today, on this"
    assert [x.name for x in file.parent.iterdir()] == ["rates.json"]


def test_plans_go_by_the_file_of_the_config(tmp_path) -> None:
    assert resources(save(tmp_path), Alone()).rates == RATES


def test_processes_go_by_the_slowest(tmp_path) -> None:
    links = RATES.link_bytes_per_second | {Link.H2D: 1.0}
    other = save(tmp_path / "there", replace(RATES, link_bytes_per_second=links))
    group = Pair(json.loads(other.read_text()))
    found = resources(save(tmp_path / "here"), group).rates
    assert found == replace(RATES, link_bytes_per_second=links)


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
        found.append(f"{changes}\n{caught.value}".replace(str(file), "FILE"))
    golden.check("damaged_rates.txt", "\n".join(found))
