"""With experts and the weights around them divided, training is that of one device.

DeepSpeed-MoE's E+D+M and, with state on the host, E+Z-Off+M; and with sequences divided
in place of the weights around experts.
"""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.meshes import BOUND
from zinf.initialize import make_planner
from zinf.models import GPTConfig, init_and_loss
from zinf.program import ArrayId, Role

EXAMPLES, LENGTH, VOCAB, STEPS = 16, 8, 32, 2
EXPERTS, GROUP = 4, 8
# Experts take as many tokens of a routing group as they get on average, or all.
CAPACITIES = {"capacity": 1.0, "dropless": None}


def model(capacity: str) -> Any:
    config = GPTConfig(
        num_layers=1,
        num_heads=4,
        embed_dim=16,
        vocab_size=VOCAB,
        max_length=LENGTH,
        num_experts=EXPERTS,
        experts_per_token=1,
        capacity_factor=CAPACITIES[capacity],
        routing_group_size=GROUP,
    )
    return init_and_loss(config, seed=0)


def mesh(beside: str = "tensor") -> Any:
    """Two devices along `expert`, two along `fsdp` and two along another axis."""
    num_seq, num_tensor = (2, 1) if beside == "seq" else (1, 2)
    return zinf.make_mesh(
        jax.devices()[:8], num_expert=2, num_seq=num_seq, num_tensor=num_tensor
    )


def config(stage: int, tier: str) -> dict[str, Any]:
    """Clipping at a norm below those that occur, and accumulation."""
    execution = "fused" if tier == "fused" else "streamed"
    device = "cpu" if tier == "host" else "none"
    return {
        "execution": execution,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "gradient_accumulation_steps": 2,
        "memory": {"device": "64MiB", "host": "64MiB"},
    }


@cache
def train(
    num_devices: int,
    capacity: str,
    stage: int = 0,
    tier: str = "fused",
    beside: str = "tensor",
) -> list[float]:
    """The losses and gradient norms of some steps."""
    init, loss = model(capacity)
    on = mesh(beside) if num_devices > 1 else zinf.make_mesh(jax.devices()[:1])
    settings = config(stage, tier)
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=on)
    random = np.random.default_rng(1)
    found = []
    for _ in range(STEPS):
        tokens = random.integers(0, VOCAB, (EXAMPLES, LENGTH + 1)).astype(np.int32)
        metrics = engine.step({"tokens": tokens})
        found += [float(metrics[k]) for k in ("loss", "grad_norm")]
    engine.close()
    return found


# Only sums over devices are in another order, as in `test_experts`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stage", "tier"),
    [("capacity", 0, "fused"), ("capacity", 2, "host"), ("dropless", 3, "fused")],
)
def test_losses_and_norms_are_those_of_one_device(capacity, stage, tier):
    found = train(8, capacity, stage, tier)
    np.testing.assert_allclose(found, train(1, capacity), rtol=BOUND)


# A routing group of `GROUP` tokens is one example, of which each device has a half.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stage", "tier"), [("capacity", 3, "fused"), ("dropless", 2, "host")]
)
def test_sequences_and_experts_are_divided_at_once(capacity, stage, tier):
    found = train(8, capacity, stage, tier, "seq")
    np.testing.assert_allclose(found, train(1, capacity), rtol=BOUND)


def test_attention_is_cut_along_tensor_and_state_of_experts_divided_along_it():
    init, loss = model("capacity")
    tx = optax.adamw(1e-2)
    planner = make_planner(loss, init, tx, config(1, "fused"), mesh=mesh())
    tokens = {"tokens": np.zeros((EXAMPLES, LENGTH + 1), np.int32)}
    layouts = planner.layouts(planner.trace(planner.batch_spec(tokens)))

    def spec(role: Role, path: str) -> Any:
        return layouts.of(ArrayId(role, f"blocks/0/{path}")).device.spec

    for role in (Role.PARAM, Role.GRADIENT):
        assert spec(role, "attention/query/kernel")[1] == "tensor"
        assert spec(role, "attention/out/kernel")[0] == "tensor"
    up = next(a.path for a in layouts.arrays if a.path.endswith("up/kernel"))
    own = layouts.of(ArrayId(Role.PARAM, up))
    assert own.device.spec == jax.P("expert")
    assert own.share.spec[0] == "expert"
    assert own.share.shard_shape(own.padded)[0] == EXPERTS // 2
    assert np.prod(own.share.shard_shape(own.padded)) * 8 == np.prod(own.shape)
