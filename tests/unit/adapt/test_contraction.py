"""Which parameters a loss multiplies by activations, as its jaxpr shows."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tests.equivalence.programs import GPT_INIT, GPT_LOSS, TOKENS
from tests.unit.adapt.small import BATCH, DIM, normal
from zinf.adapt.contraction import Contraction, find_contractions
from zinf.core.segment import named_leaves


def found(loss, params, batch=BATCH):
    named = named_leaves(params)
    shapes = {path: tuple(x.shape) for path, x in named.items()}
    return find_contractions(jax.make_jaxpr(loss)(params, batch), shapes)


def test_scanned_layers_of_an_nnx_module():
    linear = found(GPT_LOSS, jax.eval_shape(GPT_INIT), TOKENS)
    kernels = {p.removeprefix("blocks/").removesuffix("/kernel") for p in linear.linear}
    projections = {f"attention/{n}" for n in ("query", "key", "value", "out")}
    assert kernels == projections | {"mlp/up", "mlp/down"}
    query = linear.contractions["blocks/attention/query/kernel"]
    assert query == Contraction(1, (), (1,), (2,))
    assert linear.looked_up == {"token_embedding"}


def test_kernels_of_attention_have_three_dims():
    attention = nnx.MultiHeadAttention(2, DIM, rngs=nnx.Rngs(0), decode=False)
    graphdef, params, rest = nnx.split(attention, nnx.Param, ...)
    params = nnx.to_pure_dict(params)

    def loss(params, batch):
        module = nnx.merge(graphdef, params, rest)
        return jnp.mean(module(batch["x"][None]))

    kernels = found(loss, params).contractions
    assert kernels["query/kernel"] == Contraction(0, (), (0,), (1, 2))
    assert kernels["out/kernel"] == Contraction(0, (), (0, 1), (2,))
    assert len(kernels) == 4


def test_head_router_and_embedding_are_left_out():
    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        gates = jax.nn.sigmoid(x @ params["router"].T)
        best, _ = lax.top_k(gates, 1)
        x = x + best * jnp.tanh(x @ params["hidden"])
        logits = x @ params["head"] + params["bias"][None]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {
        "embed": normal(0, 16, DIM),
        "router": normal(1, 3, DIM),
        "hidden": normal(2, DIM, DIM),
        "head": normal(3, DIM, 16),
        "bias": jnp.zeros(16),
    }
    linear = found(loss, params, {"tokens": jnp.arange(4)})
    assert linear.linear == ["hidden"]
    assert linear.looked_up == {"embed"} and linear.choosing == {"router", "head"}
    # Torch keeps [outputs, inputs].
    assert linear.contractions["router"] == Contraction(0, (), (1,), (0,))


def test_experts_share_the_dim_of_experts_with_the_activation():
    def loss(params, batch):
        x = jnp.einsum("ecd,edf->ecf", batch["x"], params["up"])
        return jnp.sum(lax.ragged_dot(x[0], params["down"], batch["sizes"]))

    params = {"up": normal(0, 2, DIM, 6), "down": normal(1, 3, 6, DIM)}
    batch = {"x": normal(2, 2, 4, DIM), "sizes": jnp.array([1, 2, 1])}
    linear = found(loss, params, batch)
    assert linear.contractions == {
        "up": Contraction(0, (0,), (1,), (2,)),
        "down": Contraction(0, (0,), (1,), (2,)),
    }


def test_a_product_of_two_parameters_is_no_linear_layer():
    def loss(params, batch):
        return jnp.mean(batch["x"] * jnp.sum(params["a"] @ params["b"]))

    assert not found(loss, {"a": normal(0, 4, 4), "b": normal(1, 4, 4)}).contractions
