"""Experts that devices divide: how tokens travel, and that numbers are the same."""

from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.marks import slow
from zinf.core.jaxpr import flatten
from zinf.core.sharding import axis_rule
from zinf.core.sharding.axes.experts import expert_dims, on_mesh
from zinf.core.sharding.mesh import make_mesh
from zinf.core.topology import collectives_of
from zinf.moe import Capacity, Router, experts, keeps_exchanged

EXPERTS, DIM, HIDDEN, TOKENS = 8, 16, 24, 256
PARTS = 4
MESH = make_mesh(jax.devices()[:8], num_expert=PARTS)
A_DEVICE = TOKENS // 8
# Sums of float32 in another order.
ROUNDING = 1e-6


def rule_of(mesh):
    return axis_rule(mesh, stage=0, min_bytes=0)


def expert(weights, rows):
    return jnp.tanh(rows @ weights["up"]) @ weights["down"]


def loss_with(router):
    def loss(params, x):
        routing = router(params["router"], x)
        y = experts(
            expert,
            params["experts"],
            x,
            routing.choice,
            routing.gate,
            capacity=routing.capacity,
        )
        return jnp.mean(y**2) + routing.aux_loss

    return loss


def normals(**shapes):
    random = np.random.default_rng(0)
    return {n: random.standard_normal(s, np.float32) for n, s in shapes.items()}


PARAMS = normals(router=(DIM, EXPERTS)) | {
    "experts": normals(up=(EXPERTS, DIM, HIDDEN), down=(EXPERTS, HIDDEN, DIM)),
}
X = normals(x=(TOKENS, DIM))["x"]


def router(k, **options):
    return Router(
        num_experts=EXPERTS,
        k=k,
        top2_2nd_expert_sampling=False,
        min_capacity=1,
        **options,
    )


def compiled(loss, mesh=MESH):
    """The gradient with experts and tokens divided, and its arguments."""
    rows = NamedSharding(mesh, PartitionSpec(("fsdp", "expert")))
    whole = NamedSharding(mesh, PartitionSpec())
    own = NamedSharding(mesh, PartitionSpec("expert"))
    forms = {"router": whole, "experts": {"up": own, "down": own}}
    gradient = jax.value_and_grad(on_mesh(loss, rule_of(mesh)), (0, 1))
    shardings = {
        "in_shardings": (forms, rows),
        "out_shardings": (whole, (forms, rows)),
    }
    run = jax.jit(gradient, **shardings).lower(PARAMS, X).compile()
    return run, (jax.device_put(PARAMS, forms), jax.device_put(X, rows))


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        # Groups of a device, and of half a device.
        ({"k": 2, "group_size": A_DEVICE}, True),
        slow(({"k": 3, "group_size": A_DEVICE // 2, "drop_policy": "position"}, True)),
        # Any device's tokens may all go to one expert.
        ({"k": 1, "drop_tokens": False}, False),
        # Six of eight experts a token: to gather sends less.
        slow(({"k": 6, "group_size": A_DEVICE}, False)),
    ],
)
def test_tokens_travel_by_two_all_to_alls_each_way_or_are_gathered(options, sent):
    loss = loss_with(router(**options))
    run, arguments = compiled(loss)
    found = collectives_of(run)
    kinds = Counter(c.kind for c in found for _ in range(c.times))
    assert kinds["all-to-all"] == (4 if sent else 0)
    # Sums of tokens forward, and gradients of tokens and of gates backward.
    assert kinds["reduce-scatter"] == (0 if sent else 3)
    # Gradients of experts are summed by the devices that have the same ones.
    own = 2 * EXPERTS // PARTS * DIM * HIDDEN * 4
    (summed,) = (c for c in found if c.kind == "all-reduce" and c.sent_bytes >= own)
    assert summed.group_size == 8 // PARTS
    # No expert moves.
    weights = EXPERTS * DIM * HIDDEN * 4
    gathered = [c.sent_bytes for c in found if c.kind == "all-gather"]
    assert max(gathered) < weights * (PARTS - 1) / PARTS
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(PARAMS, X)
    chex.assert_trees_all_close(
        jax.device_get(run(*arguments)), expected, rtol=ROUNDING, atol=ROUNDING
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"group_size": A_DEVICE}, "all-to-all"),
        ({"drop_tokens": False}, "reduce-scatter"),
    ],
)
def test_recomputing_sends_nothing_twice_if_what_was_sent_is_kept(options, kind):
    """Communication-aware checkpointing, as in DeepSpeed-TED."""
    loss = loss_with(router(1, use_rts=False, **options))
    policies = {"plain": None, "kept": keeps_exchanged()}
    ways = {name: jax.checkpoint(loss, policy=p) for name, p in policies.items()}
    sent, results = {}, {}
    for name, way in {"no remat": loss, **ways}.items():
        run, arguments = compiled(way)
        found = collectives_of(run)
        sent[name] = Counter(c.kind for c in found for _ in range(c.times))
        results[name] = jax.device_get(run(*arguments))
    assert sent["kept"] == sent["no remat"]
    # Without the policy the forward pass's go again: two all-to-alls, or the sum.
    again = {"all-to-all": 2, "reduce-scatter": 1}[kind]
    assert sent["plain"][kind] == sent["no remat"][kind] + again
    for name in policies:
        chex.assert_trees_all_close(
            results[name], results["no remat"], rtol=ROUNDING, atol=ROUNDING
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_expert", [1, PARTS])
def test_tokens_that_devices_cannot_divide_evenly_are_padded(num_expert):
    """On a mesh without an axis of experts, too, which divides tokens alone."""
    mesh = make_mesh(jax.devices()[:8], num_expert=num_expert)
    loss = loss_with(router(2, group_size=13))
    found = jax.jit(on_mesh(loss, rule_of(mesh)))(PARAMS, X[:13])
    np.testing.assert_allclose(found, loss(PARAMS, X[:13]), rtol=ROUNDING)


@pytest.mark.slow
def test_routes_beyond_a_capacity_make_the_result_nan():
    choice = jnp.zeros((TOKENS, 1), jnp.int32)
    gate = jnp.ones(choice.shape)

    def total(weights, x, capacity):
        return experts(expert, weights, x, choice, gate, capacity=capacity).sum()

    run = jax.jit(on_mesh(total, rule_of(MESH)), static_argnums=2)
    capacity = Capacity(A_DEVICE // 2, A_DEVICE)
    assert jnp.isnan(run(PARAMS["experts"], X, capacity))
    wanted = total(PARAMS["experts"], X, None)
    np.testing.assert_allclose(
        run(PARAMS["experts"], X, Capacity(TOKENS, TOKENS)), wanted, rtol=1e-5
    )


def test_pieces_and_an_odd_number_of_experts_are_refused():
    choice = jnp.zeros((TOKENS, 1), jnp.int32)

    def shape_of(splits, weights):
        def total(weights, x):
            gate = jnp.ones(choice.shape)
            return experts(expert, weights, x, choice, gate, splits=splits)

        jax.eval_shape(on_mesh(total, rule_of(MESH)), weights, X)

    with pytest.raises(NotImplementedError, match="in 2 pieces .* mesh.expert is 4"):
        shape_of(2, PARAMS["experts"])
    with pytest.raises(ValueError, match="6 experts, which mesh.expert = 4 devices"):
        shape_of(1, jax.tree.map(lambda w: w[:6], PARAMS["experts"]))


@pytest.mark.slow
def test_tokens_that_a_tensor_group_shares_are_sent_once():
    """Duplicate token dropping, as in DeepSpeed-TED."""
    loss = loss_with(router(k=1, group_size=A_DEVICE, use_rts=False))
    sent = {}
    for num_tensor in (1, 2):
        mesh = make_mesh(jax.devices()[:8], num_expert=PARTS, num_tensor=num_tensor)
        run, arguments = compiled(loss, mesh)
        found = [c for c in collectives_of(run) if c.kind == "all-to-all"]
        sent[num_tensor] = [c.operand_bytes for c in found for _ in range(c.times)]
    # Two devices have the same tokens and send half of them each: as many bytes as
    # where each device has tokens of its own.
    assert len(sent[1]) == 4
    assert sent[2] == sent[1]
    wanted = jax.value_and_grad(loss, (0, 1))(PARAMS, X)
    chex.assert_trees_all_close(run(*arguments), wanted, rtol=ROUNDING, atol=ROUNDING)


def test_weights_of_experts_are_leaves_behind_casts_and_transposes():
    """Weights that are computed are none."""

    def mixed(weights, x):
        choice = jnp.zeros((len(x), 1), jnp.int32)
        return experts(lambda w, r: r @ w, weights, x, choice, jnp.ones(choice.shape))

    def loss(p, x):
        x = mixed(p["a"].astype(jnp.bfloat16).astype(jnp.float32), x)
        x = jax.checkpoint(mixed)(p["b"].swapaxes(1, 2), x)
        x = mixed(p["c"].transpose(2, 0, 1), x @ p["d"])
        return mixed(p["e"] + p["a"] @ p["d"][None], x)

    one = (EXPERTS, DIM, DIM)
    shapes = {"a": one, "b": one, "c": (DIM, DIM, EXPERTS), "d": (DIM, DIM), "e": one}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    graph = flatten(jax.make_jaxpr(on_mesh(loss, rule_of(MESH)))(params, X))
    leaves = dict(zip(graph.invars, shapes, strict=False))
    assert expert_dims(graph, leaves) == {"a": 0, "b": 0, "c": 2}
