"""Routed experts of `transformers` models, divided over devices."""

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import mixtral, save, tokens
from zinf import hf
from zinf.program import ArrayId, Role

SAMPLES, STEPS = 16, 3
# Sums of float32 in another order, carried over three steps: see
# `tests/equivalence/meshes.py`.
BOUND = 16 * 2.0**-23


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_losses_with_an_expert_axis_are_those_of_one_device(name, tmp_path):
    save(mixtral() if name == "mixtral" else config_of(name), tmp_path)

    def train(num_devices: int, num_expert: int, stage: int) -> list[float]:
        mesh = zinf.make_mesh(jax.devices()[:num_devices], num_expert=num_expert)
        config = {
            "zero_optimization": {"stage": stage},
            "persistence_threshold": 1,
            "gradient_clipping": 0.05,
        }
        engine = hf.initialize(hf.load(tmp_path), optax.adamw(1e-3), config, mesh=mesh)
        batch = {"input_ids": tokens(SAMPLES)}
        found = [engine.step(batch) for _ in range(STEPS)]
        stacked = [
            engine.residents.layouts.of(ArrayId(Role.PARAM, path))
            for path in engine.model.specs
            if ".experts." in path
        ]
        assert stacked
        for layout in stacked:
            assert layout.device_shape[0] * num_expert == layout.shape[0]
        engine.close()
        return [m[k] for m in found for k in ("loss", "grad_norm")]

    expected = train(1, 1, 0)
    np.testing.assert_allclose(train(8, 4, 3), expected, rtol=BOUND)
    assert expected[-2] < expected[0]
