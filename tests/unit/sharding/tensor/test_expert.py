"""How devices divide the weights of an expert is found in its program."""

from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr import flatten
from zinf.core.sharding import axis_rule
from zinf.core.sharding.axes.experts import expert_dims, on_mesh
from zinf.core.sharding.axes.tensor import cut_expert
from zinf.core.sharding.mesh import TENSOR, make_mesh
from zinf.core.topology import collectives_of
from zinf.moe import Router, experts

EXPERTS, DIM, HIDDEN, TOKENS = 4, 8, 16, 64
SHAPES = {
    "bias": (HIDDEN,),
    "down": (HIDDEN, DIM),
    "gate": (DIM, HIDDEN),
    "last": (DIM,),
    "up": (DIM, HIDDEN),
}


def rule_of(mesh):
    return axis_rule(mesh, stage=0, min_bytes=0, cuts_experts=True)


def gated(w, rows):
    """Every way to read a weight that can be cut, and two biases."""
    hidden = jax.nn.silu(rows @ w["gate"] + w["bias"].reshape(1, -1))
    hidden = jnp.maximum(hidden * (rows @ w["up"]), -0.5)
    return 2 * (hidden @ w["down"] / 3.0) + w["last"][None]


def parts_of(function, parts=2):
    one = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    rows = jax.ShapeDtypeStruct((8, DIM), jnp.float32)
    found = cut_expert(function, one, rows, parts)
    dims = dict(zip(sorted(SHAPES), found.dims, strict=True))
    return dims, {n for n, x in zip(sorted(SHAPES), found.are_added, strict=True) if x}


def test_first_weights_are_cut_by_columns_the_last_by_rows_and_its_bias_added_once():
    dims, added = parts_of(gated)
    assert dims == {"bias": 0, "down": 0, "gate": 1, "last": None, "up": 1}
    assert added == {"last"}


def normed(w, rows):
    return jax.nn.standardize(rows @ w["up"]) @ w["down"]


def scaled_by_a_size(w, rows):
    return gated(w, rows) * w["down"].shape[0] ** -0.5


def numbered(w, rows):
    hidden = jnp.tanh(rows @ w["up"])
    return (hidden + jnp.arange(hidden.shape[1])[None]) @ w["down"]


def of_one_size(w, rows):
    return (rows @ w["up"]).reshape(-1, 2, HIDDEN // 2).reshape(-1, HIDDEN) @ w["down"]


def bias_read_twice(w, rows):
    return gated(w, rows * w["last"][None])


@pytest.mark.parametrize(
    ("function", "parts", "why"),
    [
        (gated, 3, r"16 entries of a value .* do not divide by 3"),
        (normed, 2, "a sum over it by `reduce_sum`"),
        (lambda w, x: jnp.tanh(gated(w, x)), 2, "`tanh` of the sum"),
        (lambda w, x: x + gated(w, x), 2, "adds more to the sum"),
        (bias_read_twice, 2, "adds more to the sum"),
        (scaled_by_a_size, 2, "depends on the sizes of its weights"),
        (numbered, 2, "`add` of hidden values and a value that is whole"),
        (of_one_size, 2, "cannot be called with parts"),
    ],
)
def test_experts_that_devices_cannot_divide_are_refused(function, parts, why):
    with pytest.raises(ValueError, match=f"cannot be divided: .*{why}.* Set it to 1"):
        parts_of(function, parts)


# Sums of float32 in another order.
ROUNDING = 1e-6
BOTH = {"num_expert": 2, "num_tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "sizes", "is_bounded"),
    [(4, {"num_tensor": 2}, True), (4, BOTH, False), (8, BOTH, True)],
)
def test_results_and_gradients_are_those_of_whole_experts(count, sizes, is_bounded):
    """Tokens are gathered along `tensor` before the experts, and sums scattered."""
    options = {"group_size": TOKENS // 8, "min_capacity": 1, "use_rts": False}
    router = Router(
        num_experts=EXPERTS, **(options if is_bounded else {"drop_tokens": False})
    )
    random = np.random.default_rng(0)
    weights = {
        n: random.standard_normal((EXPERTS, *s), np.float32) / s[0] ** 0.5
        for n, s in SHAPES.items()
    }
    kernel = random.standard_normal((DIM, EXPERTS), np.float32)
    x = random.standard_normal((TOKENS, DIM), np.float32)

    def loss(weights, kernel, x):
        routing = router(kernel, x)
        y = experts(
            gated,
            weights,
            x,
            routing.choice,
            routing.gate,
            capacity=routing.capacity,
        )
        return jnp.mean(y**2)

    mesh = make_mesh(jax.devices()[:count], **sizes)
    divided = on_mesh(loss, rule_of(mesh))
    gradients = jax.jit(jax.value_and_grad(divided, (0, 1, 2)))
    run = gradients.lower(weights, kernel, x).compile()
    wanted = jax.value_and_grad(loss, (0, 1, 2))(weights, kernel, x)
    found = jax.device_get(run(weights, kernel, x))
    chex.assert_trees_all_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)
    kinds = Counter(c.kind for c in collectives_of(run) for _ in range(c.times))
    travels = is_bounded and "num_expert" in sizes
    assert kinds["all-to-all"] == (4 if travels else 0)
    # One each way in each pass. Without all-to-alls, gates are gathered too.
    assert kinds["reduce-scatter"] == (2 if travels else 3)


def test_in_a_stack_of_layers_the_dims_of_an_expert_follow_layers_and_experts():
    def mixed(weights, x):
        choice = jnp.argsort(x, axis=1)[:, :1].astype(jnp.int32) % EXPERTS
        return experts(gated, weights, x, choice, jnp.ones(choice.shape))

    def loss(weights, x):
        return jax.lax.scan(lambda x, w: (mixed(w, x), None), x, weights)[0].sum()

    mesh = make_mesh(jax.devices()[:4], num_expert=2, num_tensor=2)
    stack = {
        n: jax.ShapeDtypeStruct((3, EXPERTS, *s), jnp.float32)
        for n, s in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    closed = jax.make_jaxpr(on_mesh(loss, rule_of(mesh)))(stack, x)
    graph = flatten(closed, stacked=tuple(closed.jaxpr.invars[: len(stack)]))
    leaves = dict(zip(graph.invars, sorted(stack), strict=False))
    assert expert_dims(graph, leaves) == dict.fromkeys(SHAPES, 1)
    inside = {"bias": 2, "down": 2, "gate": 3, "up": 3}
    assert expert_dims(graph, leaves, axis=TENSOR) == inside


def test_pieces_of_experts_that_are_cut_inside_are_refused():
    def total(weights, x):
        choice = jnp.zeros((TOKENS, 1), jnp.int32)
        gate = jnp.ones(choice.shape)
        return experts(gated, weights, x, choice, gate, splits=2).sum()

    mesh = make_mesh(jax.devices()[:4], num_tensor=2)
    weights = {n: jnp.zeros((EXPERTS, *s)) for n, s in SHAPES.items()}
    with pytest.raises(NotImplementedError, match="in 2 pieces .* divides each"):
        jax.eval_shape(on_mesh(total, rule_of(mesh)), weights, jnp.zeros((TOKENS, DIM)))
