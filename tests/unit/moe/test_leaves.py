"""Which leaves hold experts is seen in the program."""

import jax
import jax.numpy as jnp

from zinf.jaxpr import flatten
from zinf.mesh import make_mesh
from zinf.moe import experts
from zinf.moe.exchange import on_mesh
from zinf.moe.leaves import expert_dims

EXPERTS, DIM, LAYERS = 4, 8, 3
X = jax.ShapeDtypeStruct((16, DIM), jnp.float32)


def mixed(weights, x):
    choice = jnp.argsort(x, axis=1)[:, :2].astype(jnp.int32) % EXPERTS
    gate = jnp.ones(choice.shape)
    return experts(lambda w, rows: jnp.tanh(rows @ w), weights, x, choice, gate)


def dims(loss, params):
    mesh = make_mesh(jax.devices()[:4], num_expert=4)
    abstract = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in params.items()}
    closed = jax.make_jaxpr(on_mesh(loss, mesh))(abstract, X)
    graph = flatten(closed, stacked=tuple(closed.jaxpr.invars[: len(params)]))
    leaves = dict(zip(graph.invars, sorted(params), strict=False))
    return expert_dims(graph, leaves)


def test_weights_of_experts_are_found_behind_casts_and_transposes():
    def loss(p, x):
        x = mixed(p["a"].astype(jnp.bfloat16).astype(jnp.float32), x)
        x = jax.checkpoint(mixed)(p["b"].swapaxes(1, 2), x)
        return mixed(p["c"].transpose(2, 0, 1), x @ p["d"])

    one = (EXPERTS, DIM, DIM)
    shapes = {"a": one, "b": one, "c": (DIM, DIM, EXPERTS), "d": (DIM, DIM)}
    assert dims(loss, shapes) == {"a": 0, "b": 0, "c": 2}


def test_in_a_stack_of_layers_experts_are_the_second_dim():
    def loss(p, x):
        return jax.lax.scan(lambda x, w: (mixed(w, x), None), x, p["w"])[0]

    assert dims(loss, {"w": (LAYERS, EXPERTS, DIM, DIM)}) == {"w": 1}


def test_weights_that_are_computed_are_no_leaves():
    def loss(p, x):
        return mixed(p["w"] + p["a"] @ p["b"], x)

    shapes = {"w": (EXPERTS, DIM, DIM), "a": (EXPERTS, DIM, 2), "b": (EXPERTS, 2, DIM)}
    assert dims(loss, shapes) == {}
