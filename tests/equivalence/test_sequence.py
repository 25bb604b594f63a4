"""With sequences cut over devices, training is that of one device."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.equivalence.meshes import BOUND
from tests.equivalence.models import (
    BATCH,
    LENGTH,
    VOCAB,
    Transformer,
    draw_tokens,
    gpt,
    linen_loss,
    nnx_loss,
)
from tests.marks import slow_except
from zinf.models import GPTConfig, init_and_loss

STEPS = 2
NUM_DEVICES = 8
STACKED = GPTConfig(
    num_layers=2,
    num_heads=4,
    embed_dim=16,
    vocab_size=VOCAB,
    max_length=LENGTH,
    scan_layers=True,
    remat=True,
)


def linen_init() -> Any:
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return Transformer().init(jax.random.key(0), tokens)["params"]


# zinf's GPT with stacked layers, as many heads as devices; its Llama form with one head
# of keys; a Linen Transformer with two heads.
MODELS = {
    "gpt": init_and_loss(STACKED, seed=0),
    "llama": (lambda: nnx.to_pure_dict(nnx.state(gpt())), nnx_loss),
    "linen": (linen_init, linen_loss),
}
CASES = [
    (model, num_seq, execution)
    for model in MODELS
    for num_seq in (2, 4)
    for execution in ("fused", "streamed")
]
FAST = [("gpt", 4, "fused")]


@cache
def train(model: str, num_seq: int, execution: str, num_devices: int) -> list[float]:
    """Losses and gradient norms of some steps, and the loss of an evaluation."""
    init, loss = MODELS[model]
    config = {
        "execution": execution,
        "zero_optimization": {"stage": 3},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "memory": {"device": "64MiB", "host": "64MiB"},
    }
    mesh = zinf.make_mesh(jax.devices()[:num_devices], num_seq=num_seq)
    engine = zinf.initialize(loss, init, optax.adamw(1e-3), config, mesh=mesh)
    random = np.random.default_rng(1)
    metrics = [engine.step(draw_tokens(random, BATCH)) for _ in range(STEPS)]
    found = [m[k] for m in metrics for k in ("loss", "grad_norm")]
    found.append(engine.evaluate(draw_tokens(random, BATCH)))
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_seq", "execution"), slow_except(FAST, CASES))
def test_losses_and_norms_are_those_of_one_device(model, num_seq, execution):
    expected = train(model, 1, execution, 1)
    found = train(model, num_seq, execution, NUM_DEVICES)
    np.testing.assert_allclose(found, expected, rtol=BOUND)


def test_a_config_asks_for_a_sequence_axis_and_refuses_other_batches():
    init, loss = MODELS["gpt"]
    config = {"mesh": {"fsdp": 2, "seq": 4}}
    engine = zinf.initialize(loss, init, optax.adamw(1e-3), config)
    assert engine.planner.rule.mesh.shape["seq"] == 4
    tokens = {"tokens": np.zeros((4, LENGTH - 1), np.int32)}
    with pytest.raises(
        ValueError, match="batch/tokens has 7 positions, which mesh.seq"
    ):
        engine.step(tokens)
    engine.close()
