"""What is saved on any devices, stage and tiers loads on any others, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.placed import SPREAD, Placement, contents, placed
from zinf.checkpoint import read_arrays, write_arrays
from zinf.checkpoint.saved import Saved
from zinf.core.program import Tier

DEVICE, HOST, NVME = ((tier,) for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME))
SOURCES = [
    Placement(1, 0, DEVICE),
    Placement(2, 3, NVME),
    Placement(4, 2, HOST),
    Placement(8, 1, SPREAD),
    Placement(8, 3, SPREAD),
]
TARGETS = [
    Placement(1, 3, NVME),
    Placement(2, 2, SPREAD),
    Placement(4, 0, DEVICE),
    Placement(8, 3, HOST),
    Placement(8, 1, SPREAD),
]
ARRAYS = contents()
SCALARS = {"num_steps": 3}


@pytest.fixture(scope="module", params=SOURCES, ids=str)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A checkpoint of a placement."""
    directory = tmp_path_factory.mktemp("saved") / "state"
    with placed(request.param, ARRAYS) as residents:
        write_arrays(directory, residents, SCALARS)
    yield directory


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_pair_is_bit_equal(saved, target):
    blank = {array: np.ones_like(value) for array, value in ARRAYS.items()}
    with placed(target, blank) as residents:
        assert read_arrays(saved, residents) == SCALARS
        for array, value in ARRAYS.items():
            assert residents.read(array).tobytes() == value.tobytes(), array


def test_every_checkpoint_is_sound(saved):
    with Saved(saved) as found:
        assert list(found.verify()) == []
        for array, value in ARRAYS.items():
            assert found.read(array).tobytes() == value.tobytes()


def test_the_pairs_are_of_all_devices_stages_and_tiers():
    for placements in (SOURCES, TARGETS):
        assert {p.num_devices for p in placements} == {1, 2, 4, 8}
        assert {p.stage for p in placements} == {0, 1, 2, 3}
        assert {t for p in placements for t in p.tiers} == set(Tier)
