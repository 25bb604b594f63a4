"""On every mesh, ZeRO stage and tier training is that of one device.

`scripts/reports/mesh_matrix.py` runs all of them; here is a sample.
"""

import pytest

from tests.equivalence.meshes import BOUND, MESHES, ONE, STAGES, TIERS, train
from tests.marks import slow_except

STREAMED = [tier for tier, placement in TIERS.items() if placement is not None]
ALL_ON = ("8", 3)
SAMPLE = [
    *[(*ALL_ON, tier) for tier in TIERS],
    *[("8", stage, "optimizer on host") for stage in STAGES[:3]],
    *[("8", stage, "fused") for stage in STAGES[:3]],
    ("2x4", 0, "nvme"),
    ("2x4", 2, "device"),
    ("2x4", 3, "fused"),
    ("4x2", 1, "fused"),
    ("4x2", 1, "host"),
    ("4x2", 3, "nvme"),
    ("2", 1, "fused"),
    ("2", 3, "nvme"),
    ("4", 2, "fused"),
    ("4", 2, "host"),
    ("4", 3, "optimizer on host"),
]
# Every mesh, stage and tier in at least one.
FAST = [
    *[(*ALL_ON, tier) for tier in TIERS],
    ("2x4", 0, "nvme"),
    ("4x2", 1, "fused"),
    ("4", 2, "fused"),
    ("2", 1, "fused"),
]


@pytest.mark.sampled(2, slow=4)
@pytest.mark.parametrize(("mesh", "stage", "tier"), slow_except(FAST, SAMPLE))
def test_losses_and_norms_are_those_of_one_device(mesh, stage, tier):
    expected, found = train(ONE, 0, "device"), train(mesh, stage, tier)
    assert found.losses[-1] < found.losses[0]
    assert found.deviation(expected) <= BOUND


@pytest.mark.parametrize("tier", STREAMED[1:])
def test_tiers_are_bit_equal_on_eight_devices(tier):
    expected, found = train(*ALL_ON, "device"), train(*ALL_ON, tier)
    assert found.is_bit_equal(expected)


def test_the_sample_has_every_mesh_stage_and_tier():
    for sample in (SAMPLE, FAST):
        meshes, stages, tiers = map(set, zip(*sample, strict=True))
        assert meshes == MESHES.keys() - {ONE}
        assert (stages, tiers) == (set(STAGES), TIERS.keys())
