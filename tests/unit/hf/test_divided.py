"""Weights, experts and positions of `transformers` models, divided over devices."""

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import gpt2, llama, save, tokens
from zinf import hf
from zinf.core.program import ArrayId, Role

pytestmark = pytest.mark.slow
SAMPLES, STEPS = 16, 2
# Sums of float32 in another order, carried over the steps: see
# `tests/equivalence/meshes.py`.
BOUND = 16 * 2.0**-23


def train(folder, num_devices, stage, *, batch=None, attention="auto", **axes):
    """Losses and norms, and the layouts of all arrays."""
    mesh = zinf.make_mesh(jax.devices()[:num_devices], **axes)
    config = {
        "zero_optimization": {"stage": stage},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "model": {"attention": attention},
    }
    batch = batch or {"input_ids": tokens(SAMPLES)}
    model, named = hf.load(folder), {"batch": batch, "mesh": mesh}
    with hf.initialize(model, optax.adamw(1e-3), config, **named) as engine:
        metrics = [engine.step(batch) for _ in range(STEPS)]
        layouts = engine.residents.layouts
    return [m[k] for m in metrics for k in ("loss", "grad_norm")], layouts


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_divided_and_losses_stay(name, tmp_path):
    save(config_of(name), tmp_path)
    expected, _ = train(tmp_path, 1, 0)
    found, layouts = train(tmp_path, 8, 3, num_expert=4)
    np.testing.assert_allclose(found, expected, rtol=BOUND)
    assert expected[-2] < expected[0]
    paths = [path for path in hf.load(tmp_path).specs if ".experts." in path]
    assert paths
    for path in paths:
        layout = layouts.of(ArrayId(Role.PARAM, path))
        assert layout.device_shape[0] * 4 == layout.shape[0]


LLAMA = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], 0)
LLAMA |= {"o_proj": 1, "down_proj": 1}
# Query, key and value of GPT-2 are one weight, so its attentions are not cut.
GPT2 = {"c_fc": 1, "c_proj": 0}
# In BLOOM it has heads first; samples and heads, which it joins, are kept apart.
BLOOM = {"query_key_value": 0, "dense": 1}
BLOOM |= {"dense_h_to_4h": 0, "dense_4h_to_h": 1}


# torch's linear layers keep (out, in); those of GPT-2 (in, out).
@pytest.mark.parametrize(
    ("make", "dims"),
    [(llama, LLAMA), (gpt2, GPT2), (lambda: config_of("bloom"), BLOOM)],
    ids=["llama", "gpt2", "bloom"],
)
def test_layers_are_cut_by_columns_and_rows_and_losses_stay(make, dims, tmp_path):
    save(make(), tmp_path)
    expected, _ = train(tmp_path, 1, 1)
    found, layouts = train(tmp_path, 4, 1, num_tensor=2)
    np.testing.assert_allclose(found, expected, rtol=BOUND)
    cut = {
        array.path.split(".")[-2]: entry.layout
        for array, entry in layouts.arrays.items()
        if array.path.endswith(".weight") and "tensor" in entry.layout.computed.spec
    }
    assert cut.keys() == dims.keys()
    for name, layout in cut.items():
        shape = list(layout.shape)
        shape[dims[name]] //= 2
        assert layout.computed.shard_shape(layout.shape) == tuple(shape), name


# Three samples in a row of twelve tokens: two devices divide the second one.
PACKED = np.tile(np.int32([1] * 4 + [2] * 5 + [3] * 3), (SAMPLES, 1))


@pytest.mark.parametrize(
    ("name", "attention", "more"),
    [
        ("llama", "blocks", {}),
        ("llama", "xla", {"segment_ids": PACKED}),
        # A window and a soft cap; values of sinks.
        ("gemma2", "blocks", {"segment_ids": PACKED}),
        ("gpt_oss", "blocks", {"segment_ids": PACKED}),
    ],
)
def test_positions_are_divided_and_losses_stay(name, attention, more, tmp_path):
    """Positions count across devices, and samples of a row stay apart there."""
    save(config_of(name), tmp_path)
    options = {"batch": {"input_ids": tokens(SAMPLES)} | more, "attention": attention}
    expected, _ = train(tmp_path, 1, 0, **options)
    found, _ = train(tmp_path, 4, 3, num_seq=2, **options)
    np.testing.assert_allclose(found, expected, rtol=BOUND)
    assert expected[-2] < expected[0]
