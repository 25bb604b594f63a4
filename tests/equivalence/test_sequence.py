"""With sequences cut over devices; `test_meshes` has the numbers of training."""

import numpy as np
import pytest

from tests.equivalence.models import LENGTH
from tests.equivalence.networks import STACKED, TRANSFORMER
from tests.equivalence.training import BOUND, FUSED, OPTIMIZERS, Setting, mesh_of


@pytest.mark.slow
@pytest.mark.parametrize("model", [STACKED, TRANSFORMER], ids=lambda m: m.name)
def test_the_loss_of_an_evaluation_is_that_of_one_device(model):
    losses = []
    for mesh in ("1", "S+D"):
        config = Setting(FUSED).config(model, "")
        with model.start(OPTIMIZERS["adam"], config, mesh=mesh_of(mesh)) as engine:
            losses.append(engine.evaluate(model.batches(1)[0]))
    np.testing.assert_allclose(*losses, rtol=BOUND)


def test_a_config_asks_for_a_sequence_axis_and_refuses_other_batches():
    config = {"mesh": {"fsdp": 2, "seq": 4}}
    with STACKED.start(OPTIMIZERS["adam"], config) as engine:
        assert engine.planner.rule.mesh.shape["seq"] == 4
        tokens = {"tokens": np.zeros((4, LENGTH - 1), np.int32)}
        with pytest.raises(
            ValueError, match="batch/tokens has 7 positions, which mesh.seq"
        ):
            engine.step(tokens)
