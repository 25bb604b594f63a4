"""MoE layers: NNX and Linen, residual and shared experts, a bias that is state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import zinf
import zinf.nnx
from tests.marks import slow
from zinf.moe import MoE, Router, RouterBias, balanced_bias, experts
from zinf.moe.linen import MoE as LinenMoE

DIM, EXPERTS, TOKENS = 8, 4, 32
random = np.random.default_rng(0)
X = random.standard_normal((2, TOKENS // 2, DIM), np.float32)
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
TWO = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
BALANCED = {"k": 2, "score_func": "sigmoid", "drop_tokens": False}


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(DIM, 12, rngs=rngs)
        self.down = nnx.Linear(12, DIM, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(rows)))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        hidden = nn.Dense(12)(rows)
        return nn.Dense(DIM)(nn.gelu(hidden))


def layer(**options) -> MoE:
    return MoE(DIM, Mlp, EXPERTS, rngs=nnx.Rngs(0), **options)


def one_of(moe: MoE, expert: int) -> nnx.Module:
    graphdef, weights = nnx.split(moe.experts)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w[expert], weights))


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"use_residual": True}),
        slow({"shared_expert": Mlp}),
    ],
)
def test_a_layer_is_the_gated_sum_of_its_experts_and_of_the_dense_ones(options):
    moe = layer(**TWO, **options)
    output, aux_loss, counts = moe(X)
    rows = X.reshape(-1, DIM)
    routing = moe.router(moe.router_kernel[...], rows)
    choice, gate = map(np.asarray, (routing.choice, routing.gate))
    results = np.stack([one_of(moe, i)(rows) for i in range(EXPERTS)])
    tokens = np.arange(TOKENS)
    wanted = sum(gate[:, j, None] * results[choice[:, j], tokens] for j in range(2))
    if moe.residual is not None:
        weight = jax.nn.softmax(moe.coefficient(rows))
        wanted = wanted * weight[:, :1] + moe.residual(rows) * weight[:, 1:]
    if moe.shared_expert is not None:
        wanted = wanted + moe.shared_expert(rows)
    np.testing.assert_allclose(output, wanted.reshape(X.shape), **ROUNDING)
    np.testing.assert_array_equal(counts, routing.counts)
    assert int(counts.sum()) == 2 * TOKENS
    assert float(aux_loss) == float(routing.aux_loss)
    # `experts` with the routes of the layer gives the bits of its experts.
    if not options:
        graphdef, weights = nnx.split(moe.experts)
        routes = weights, rows, routing.choice, routing.gate
        found = experts(lambda w, r: nnx.merge(graphdef, w)(r), *routes)
        np.testing.assert_array_equal(found.reshape(X.shape), output)


def test_expert_i_starts_from_its_own_key() -> None:
    moe, key = layer(), nnx.Rngs(0)
    key.params()  # The router's.
    third = Mlp(nnx.Rngs(jax.random.fold_in(key.params(), 2)))
    chex.assert_trees_all_equal(nnx.state(one_of(moe, 2)), nnx.state(third))


@pytest.mark.slow
def test_linen_computes_what_nnx_does() -> None:
    moe = layer(use_residual=True, **TWO)
    router = Router(num_experts=EXPERTS, **TWO)
    linen = LinenMoE(LinenMlp(), router, use_residual=True)
    params = linen.init(jax.random.key(0), X)["params"]

    def dense(*modules: nnx.Linear) -> list[dict]:
        return [{"kernel": m.kernel[...], "bias": m.bias[...]} for m in modules]

    def mlp(module: nnx.Module) -> dict:
        both = dense(module.up, module.down)
        return {f"Dense_{i}": x for i, x in enumerate(both)}

    (coefficient,) = dense(moe.coefficient)
    given = {
        "router": moe.router_kernel[...],
        "experts": mlp(moe.experts),
        "residual": mlp(moe.residual),
        "coefficient": coefficient,
    }
    chex.assert_trees_all_equal_shapes_and_dtypes(params, given)
    chex.assert_trees_all_close(linen.apply({"params": given}, X), moe(X), **ROUNDING)


@pytest.mark.slow
def test_evaluation_uses_its_own_capacity_and_no_key() -> None:
    moe = layer(capacity_factor=0.25, eval_capacity_factor=4.0, min_capacity=0)
    assert float(moe(X, key=jax.random.key(0)).dropped) > 0
    assert float(moe(X, deterministic=True).dropped) == 0
    moe.eval()
    assert float(moe(X).dropped) == 0
    with pytest.raises(ValueError, match="got no key"):
        moe(X, deterministic=False)


def test_bfloat16_tokens_keep_their_dtype_and_their_routes() -> None:
    output, aux_loss, _ = layer(use_rts=False)(X.astype(jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    assert aux_loss.dtype == jnp.float32


class Dropping(Mlp):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_state_of_an_expert_and_a_bias_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="variables that are not nnx.Param"):
        MoE(DIM, Dropping, EXPERTS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="load_balance_coeff moves a bias"):
        layer(load_balance_coeff=0.01)


@pytest.mark.slow
def test_linen_keeps_the_bias_as_state():
    router = Router(num_experts=EXPERTS, **BALANCED)
    moe = LinenMoE(LinenMlp(), router, load_balance_coeff=0.01)
    variables = moe.init(jax.random.key(0), X)
    assert not variables["router_state"]["router_bias"].any()
    mixed, changed = moe.apply(variables, X, mutable="router_state")
    wanted = balanced_bias(jnp.zeros(EXPERTS), mixed.counts, 0.01)
    np.testing.assert_array_equal(changed["router_state"]["router_bias"], wanted)
    moe.apply(variables, X, deterministic=True)  # Changes no state.


@pytest.mark.slow
@pytest.mark.parametrize("num_expert", [1, 4])
def test_the_bias_of_a_trained_module_is_state_on_any_mesh(num_expert):
    batches = random.standard_normal((3, 16, 4, DIM), np.float32)

    def train(num_devices: int, num_expert: int):
        mesh = zinf.make_mesh(jax.devices()[:num_devices], num_expert=num_expert)
        engine = zinf.nnx.initialize(
            lambda module, batch: jnp.mean((module(batch).output - batch) ** 2),
            layer(load_balance_coeff=0.01, **BALANCED),
            optax.adamw(1e-2),
            {"zero_optimization": {"stage": 2}, "persistence_threshold": 1},
            mesh=mesh,
        )
        losses = [engine.step(batch)["loss"] for batch in batches]
        engine.evaluate(batches[0])
        trained = engine.update_module()
        engine.close()
        assert isinstance(trained.router_bias, RouterBias)
        return losses, np.asarray(trained.router_bias[...])

    expected, found = train(1, 1), train(8, num_expert)
    np.testing.assert_allclose(found[0], expected[0], rtol=16 * 2.0**-23)
    np.testing.assert_array_equal(found[1], expected[1])
    # Three steps of 0.01, up, down or none.
    assert np.abs(found[1]).max() <= 0.03 + 1e-6
    assert found[1].any()
