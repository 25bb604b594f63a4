"""What devices that divide weights send each other, in the compiled step."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

from zinf.core.engine.initialize import make_planner
from zinf.core.sharding.mesh import make_mesh
from zinf.core.topology import collectives_of, parse_topology
from zinf.models import GPTConfig, init_and_loss

PARTS = 4
AWARE = {"remat": True, "communication_aware_remat": True}


def all_reduces(*, width, batch, devices, topology=None, model=None, **options):
    """How many activations each all-reduce sums; those below half of one are left out.

    The model is one Llama layer with grouped queries and a gated MLP, and what `model`
    adds to its config.
    """
    length = 16
    gpt = GPTConfig(
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=width,
        vocab_size=32,
        max_length=length,
        norm="rmsnorm",
        position="rope",
        activation="swiglu",
        use_bias=False,
        **(model or {}),
    )
    init, loss = init_and_loss(gpt, seed=0)
    planner = make_planner(
        loss,
        init,
        optax.sgd(1e-3),
        {"execution": "fused", "persistence_threshold": 1, **options},
        mesh=make_mesh(devices, num_tensor=PARTS),
        topology=topology,
    )
    tokens = {"tokens": jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)}
    with planner.planning():
        found = collectives_of(planner.plan_batch(tokens).program.step)
    shares = len(devices) // PARTS
    itemsize = jnp.dtype(planner.config.compute_dtype).itemsize
    activation = batch * length * width * itemsize // shares
    assert all(c.kind == "all-reduce" for c in found)
    sizes = Counter()
    for c in found:
        if c.group_size == PARTS and 2 * c.operand_bytes > activation:
            # Some numbers of the gradient norm may go along.
            sizes[round(c.operand_bytes / activation)] += c.times
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "again"),
    [({}, 0), ({"remat": True}, 1), (AWARE, 0)],
    ids=["plain", "remat", "aware"],
)
def test_an_all_reduce_follows_each_weight_that_is_cut_by_rows(model, again):
    """Recomputing a layer sums nothing twice if sums are kept."""
    devices = jax.devices()[:PARTS]
    found = all_reduces(width=64, batch=32, devices=devices, model=model)
    # Forward after `out` and after `down`. Backward XLA on a CPU makes one operation of
    # the sums for gate and up, and one of those for query, key and value. Gradients
    # need no sum: all devices have the same examples.
    if not model:
        assert found == {1: 2, 2: 1, 3: 1}
    # Without, the sum after `out` goes again, in one operation with another; nothing
    # reads that after `down`.
    assert sum(size * times for size, times in found.items()) == 2 + 2 + 3 + again


@pytest.mark.gpu_compiler
def test_the_gpu_compiler_adds_what_devices_have_before_it_sums_over_them():
    topology = parse_topology("h200:4")
    found = all_reduces(
        width=512,
        batch=64,
        devices=topology.devices(),
        topology=topology,
        bf16={"enabled": True},
    )
    # Two forward and two backward, as in Megatron (section 3).
    assert found == {1: 4}
