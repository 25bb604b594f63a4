"""Weights of `transformers` models, divided over devices."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.unit.hf.models import gpt2, llama, save, tokens
from zinf import hf

SAMPLES, STEPS, PARTS = 8, 2, 2
# Sums of float32 in another order: see `tests/equivalence/meshes.py`.
BOUND = 16 * 2.0**-23


def start(folder: Any, num_devices: int, num_tensor: int) -> Any:
    config = {
        "zero_optimization": {"stage": 1},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
    }
    mesh = zinf.make_mesh(jax.devices()[:num_devices], num_tensor=num_tensor)
    return hf.initialize(hf.load(folder), optax.adamw(1e-3), config, mesh=mesh)


LLAMA = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], 0)
LLAMA |= {"o_proj": 1, "down_proj": 1}
# Query, key and value of GPT-2 are one weight, so its attentions are not cut.
GPT2 = {"c_fc": 1, "c_proj": 0}


# torch's linear layers keep (out, in); those of GPT-2 (in, out).
@pytest.mark.slow
@pytest.mark.parametrize(("make", "dims"), [(llama, LLAMA), (gpt2, GPT2)])
def test_layers_are_cut_by_columns_and_rows_and_losses_stay(make, dims, tmp_path):
    save(make(), tmp_path)
    batch = {"input_ids": tokens(SAMPLES)}
    numbers = {}
    for num_devices, num_tensor in ((1, 1), (4, PARTS)):
        engine = start(tmp_path, num_devices, num_tensor)
        metrics = [engine.step(batch) for _ in range(STEPS)]
        numbers[num_tensor] = [m[k] for m in metrics for k in ("loss", "grad_norm")]
        layouts = engine.residents.layouts.arrays
        engine.close()
    np.testing.assert_allclose(numbers[PARTS], numbers[1], rtol=BOUND)
    found = {
        array.path.split(".")[-2]: tuple(layout.computed.spec).index("tensor")
        for array, layout in layouts.items()
        if array.path.endswith(".weight") and "tensor" in layout.computed.spec
    }
    assert found == dims
