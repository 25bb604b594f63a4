"""Model state by stage is what the ZeRO paper prints."""

import pytest

from zinf.paper import model_state_bytes, sent_params


@pytest.mark.parametrize(
    ("stage", "printed"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)]
)
def test_figure_1_of_the_paper(stage, printed):
    """7.5 billion parameters on 64 devices, in GB as the figure rounds them."""
    found = model_state_bytes(7_500_000_000, stage, num_devices=64) / 1e9
    assert float(f"{found:.3g}") == printed


@pytest.mark.parametrize("stage", range(4))
def test_on_one_device_no_stage_saves_anything(stage):
    assert model_state_bytes(1000, stage, num_devices=1) == 16 * 1000


def test_only_stage_3_sends_more():
    """Section 7: one and a half times what data parallelism sends."""
    assert [sent_params(stage) for stage in range(4)] == [2, 2, 2, 3]
