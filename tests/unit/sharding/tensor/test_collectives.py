"""What devices that divide weights send each other, in the compiled step."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.unit.sharding.tensor import merged
from zinf.core.engine import programs
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import Run
from zinf.core.sharding.mesh import make_mesh
from zinf.core.step import forward
from zinf.core.topology import collectives_of, parse_topology
from zinf.models import GPTConfig, init_and_loss

PARTS, LENGTH = 4, 16
AWARE = {"remat": True, "communication_aware_remat": True}


def llama(*, width, **model):
    """One layer with grouped queries and a gated MLP, and what `model` adds to it."""
    gpt = GPTConfig(
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=width,
        vocab_size=32,
        max_length=LENGTH,
        norm="rmsnorm",
        position="rope",
        activation="swiglu",
        use_bias=False,
        **model,
    )
    return init_and_loss(gpt, seed=0)[::-1]


def merged_heads(*, width):
    """A layer that joins heads with examples."""
    shapes = merged.shapes(width)
    return merged.loss, lambda: {n: jnp.zeros(s) for n, s in shapes.items()}


def all_reduces(loss, init, inputs, *, width, devices, topology=None, **options):
    """How many activations each all-reduce sums; those below half of one are left out.

    No other collective is sent.

    Args:
        inputs: the shapes and dtypes of a batch.
    """
    planner = make_planner(
        loss,
        init,
        optax.sgd(1e-3),
        {"execution": "fused", "persistence_threshold": 1, **options},
        mesh=make_mesh(devices, num_tensor=PARTS),
        topology=topology,
    )
    with planner.planning():
        found = collectives_of(planner.plan_batch(inputs).program.step)
    shares = len(devices) // PARTS
    itemsize = jnp.dtype(planner.config.compute_dtype).itemsize
    (batch, *_) = next(iter(inputs.values())).shape
    activation = batch * LENGTH * width * itemsize // shares
    assert all(c.kind == "all-reduce" for c in found)
    sizes = Counter()
    for c in found:
        if c.group_size == PARTS and 2 * c.operand_bytes > activation:
            # Some numbers of the gradient norm may go along.
            sizes[round(c.operand_bytes / activation)] += c.times
    return sizes


def tokens(batch):
    return {"tokens": jax.ShapeDtypeStruct((batch, LENGTH + 1), jnp.int32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "again"),
    [({}, 0), ({"remat": True}, 1), (AWARE, 0)],
    ids=["plain", "remat", "aware"],
)
def test_an_all_reduce_follows_each_weight_that_is_cut_by_rows(model, again):
    """Recomputing a layer sums nothing twice if sums are kept."""
    devices = jax.devices()[:PARTS]
    network = llama(width=64, **model)
    found = all_reduces(*network, tokens(32), width=64, devices=devices)
    # Forward after `out` and after `down`. Backward XLA on a CPU makes one operation of
    # the sums for gate and up, and one of those for query, key and value. Gradients
    # need no sum: all devices have the same examples.
    if not model:
        assert found == {1: 2, 2: 1, 3: 1}
    # Without, the sum after `out` goes again, in one operation with another; nothing
    # reads that after `down`.
    assert sum(size * times for size, times in found.items()) == 2 + 2 + 3 + again


def test_no_value_is_gathered_where_heads_are_joined_with_examples():
    """Two sums forward, and backward that before the MLP: inputs have no gradient."""
    x = {"x": jax.ShapeDtypeStruct((32, LENGTH, 32), jnp.float32)}
    devices = jax.devices()[: 2 * PARTS]
    found = all_reduces(*merged_heads(width=32), x, width=32, devices=devices)
    assert found == {1: 3}


def test_a_function_of_such_heads_gathers_none_either(monkeypatch):
    made, planned = [], forward.plan_forward
    monkeypatch.setattr(
        programs,
        "plan_forward",
        lambda *a, **k: made.append(planned(*a, **k)) or made[-1],
    )
    loss, zeros = merged_heads(width=32)

    def init():
        return jax.tree.map(lambda x: jnp.full(x.shape, 0.1), zeros())

    batch = {"x": np.random.default_rng(0).standard_normal((8, LENGTH, 32), np.float32)}
    config = {"mesh": {"fsdp": 2, "tensor": PARTS}, "persistence_threshold": 1}
    with zinf.initialize(loss, init, optax.sgd(1e-3), config, batch=batch) as engine:
        found = engine.apply(lambda p, b: merged.layer(p, b["x"]), batch)
    wanted = merged.layer(init(), batch["x"])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    (only,) = made
    sent = [c for s in only.segments for c in s.forward_traffic()]
    assert {c.kind for c in sent} == {"all-reduce"}
    # The plan counts the sums after the two weights that are cut by rows.
    runs = [i.exchange for i in only.plan.instructions if isinstance(i.operation, Run)]
    assert sum(x.exposed_bytes + x.hidden_bytes for x in runs) == sum(
        round(c.sent_bytes * c.times) for c in sent
    )


@pytest.mark.gpu_compiler
def test_the_gpu_compiler_adds_what_devices_have_before_it_sums_over_them():
    topology = parse_topology("h200:4")
    found = all_reduces(
        *llama(width=512),
        tokens(64),
        width=512,
        devices=topology.devices(),
        topology=topology,
        bf16={"enabled": True},
    )
    # Two forward and two backward, as in Megatron (section 3).
    assert found == {1: 4}
