"""MoE layers: NNX and Linen, residual and shared experts, routing groups, errors."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from zinf.moe import MoE, Router, experts
from zinf.moe.gating import NO_EXPERT
from zinf.moe.linen import MoE as LinenMoE

DIM, EXPERTS, TOKENS = 8, 4, 32
X = np.asarray(jax.random.normal(jax.random.key(1), (2, TOKENS // 2, DIM)))
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


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


@pytest.mark.slow
def test_a_layer_is_the_gated_sum_of_its_experts() -> None:
    moe = layer(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    output, aux_loss, counts = moe(X)
    rows = X.reshape(-1, DIM)
    routing = moe.router(moe.router_kernel[...], rows)
    graphdef, weights = nnx.split(moe.experts)
    # Of each expert, the results of all tokens.
    results = [
        nnx.merge(graphdef, jax.tree.map(operator.itemgetter(i), weights))(rows)
        for i in range(EXPERTS)
    ]
    wanted = np.zeros_like(rows)
    for j in range(2):
        for token, expert in enumerate(np.asarray(routing.choice[:, j])):
            wanted[token] += routing.gate[token, j] * results[expert][token]
    np.testing.assert_allclose(output, wanted.reshape(X.shape), **ROUNDING)
    np.testing.assert_array_equal(counts, routing.counts)
    assert int(counts.sum()) == 2 * TOKENS
    assert float(aux_loss) == float(routing.aux_loss)


@pytest.mark.slow
def test_expert_i_starts_from_its_own_key() -> None:
    moe, key = layer(), nnx.Rngs(0)
    key.params()  # The router's.
    third = Mlp(nnx.Rngs(jax.random.fold_in(key.params(), 2)))
    stacked = nnx.to_pure_dict(nnx.state(moe.experts))
    chex.assert_trees_all_equal(
        jax.tree.map(lambda w: w[2], stacked), nnx.to_pure_dict(nnx.state(third))
    )


@pytest.mark.slow
def test_linen_computes_what_nnx_does() -> None:
    options = {"k": 2, "top2_2nd_expert_sampling": False}
    moe = layer(use_residual=True, **options)
    linen = LinenMoE(
        LinenMlp(), Router(num_experts=EXPERTS, **options), use_residual=True
    )
    params = linen.init(jax.random.key(0), X)["params"]

    def dense(module: nnx.Module) -> dict:
        return {
            f"Dense_{i}": {"kernel": m.kernel[...], "bias": m.bias[...]}
            for i, m in enumerate((module.up, module.down))
        }

    given = {
        "router": moe.router_kernel[...],
        "experts": dense(moe.experts),
        "residual": dense(moe.residual),
        "coefficient": {
            "kernel": moe.coefficient.kernel[...],
            "bias": moe.coefficient.bias[...],
        },
    }
    chex.assert_trees_all_equal_shapes_and_dtypes(params, given)
    chex.assert_trees_all_close(linen.apply({"params": given}, X), moe(X), **ROUNDING)


@pytest.mark.slow
def test_a_residual_layer_weighs_the_dense_expert_and_the_others() -> None:
    moe = layer(use_residual=True, use_rts=False)
    plain = MoE(DIM, Mlp, EXPERTS, rngs=nnx.Rngs(0), use_rts=False)
    rows = X.reshape(-1, DIM)
    weight = jax.nn.softmax(moe.coefficient(rows))
    wanted = plain(rows).output * weight[:, :1] + moe.residual(rows) * weight[:, 1:]
    np.testing.assert_allclose(moe(rows).output, wanted, **ROUNDING)


@pytest.mark.slow
def test_a_shared_expert_is_added_for_every_token() -> None:
    moe = layer(shared_expert=Mlp, use_rts=False)
    plain = MoE(DIM, Mlp, EXPERTS, rngs=nnx.Rngs(0), use_rts=False)
    wanted = plain(X).output + moe.shared_expert(X.reshape(-1, DIM)).reshape(X.shape)
    np.testing.assert_allclose(moe(X).output, wanted, **ROUNDING)


def test_capacity_is_counted_per_routing_group() -> None:
    kernel = np.zeros((DIM, EXPERTS), np.float32)
    kernel[0, 1] = 5.0  # Every token wants expert 1.
    x = np.ones((TOKENS, DIM), np.float32)
    router = Router(num_experts=EXPERTS, min_capacity=0, use_rts=False, group_size=8)
    routing = router(kernel, x)
    # Of each group of 8 the first 8 / 4 tokens are kept.
    kept = np.flatnonzero(np.asarray(routing.choice[:, 0]) != NO_EXPERT)
    assert kept.tolist() == [g + i for g in range(0, TOKENS, 8) for i in range(2)]
    assert float(routing.dropped) == 0.75
    whole = Router(num_experts=EXPERTS, min_capacity=0, use_rts=False)(kernel, x)
    assert np.flatnonzero(np.asarray(whole.choice[:, 0]) >= 0).tolist() == [*range(8)]


@pytest.mark.slow
def test_evaluation_uses_its_own_capacity_and_no_key() -> None:
    moe = layer(capacity_factor=0.25, eval_capacity_factor=4.0, min_capacity=0)
    kept = experts_used(moe, key=jax.random.key(0))
    moe.eval()
    assert experts_used(moe) == TOKENS > kept


def experts_used(moe: MoE, key: jax.Array | None = None) -> int:
    routing = moe.router(
        moe.router_kernel[...],
        X.reshape(-1, DIM),
        key=key,
        train=not moe.deterministic,
    )
    moe(X, key=key)  # It runs in this mode, too.
    return int((routing.choice != NO_EXPERT).sum())


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"k": 1, "noisy_gate_policy": "RSample", "use_rts": False},
        {"k": 2},
        {"k": 3, "noisy_gate_policy": "Jitter", "drop_policy": "position"},
    ],
)
def test_routes_depend_on_the_key_alone(options: dict) -> None:
    moe = layer(min_capacity=0, capacity_factor=0.5, **options)
    first, again, other = (moe(X, key=jax.random.key(i)).output for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_bfloat16_tokens_keep_their_dtype_and_their_routes() -> None:
    moe = layer(use_rts=False)
    output, aux_loss, _ = moe(X.astype(jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    assert aux_loss.dtype == jnp.float32


class Dropping(Mlp):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 5}, "k is 5 but there are 4 experts"),
        ({"k": 0}, "k is 0"),
        ({"capacity_factor": 0}, "capacity_factor is 0; it must be above zero"),
        ({"min_capacity": -1}, "min_capacity is -1"),
        ({"noisy_gate_policy": "jitter"}, "one of None, Jitter, RSample"),
        ({"drop_policy": "random"}, "one of probs, position"),
        ({"k": 2, "noisy_gate_policy": "RSample"}, "RSample is for k = 1"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        ({}, X, "got no key"),
        ({"use_rts": False, "group_size": 7}, X, "32 tokens do not divide"),
        ({"use_rts": False, "min_capacity": 64}, X, "fewer than min_capacity"),
        ({"use_rts": False}, X[..., :3], r"router's kernel \(8, 4\)"),
    ],
)
def test_calls_that_cannot_be_routed_are_refused(options, x, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)(x)


def test_an_expert_with_state_is_refused() -> None:
    with pytest.raises(ValueError, match="variables that are not nnx.Param"):
        MoE(DIM, Dropping, EXPERTS, rngs=nnx.Rngs(0))


def test_the_layer_is_the_function() -> None:
    """`experts` with the routes of a layer gives the layer's result, bit for bit."""
    moe = layer(use_rts=False)
    rows = X.reshape(-1, DIM)
    routing = moe.router(moe.router_kernel[...], rows)
    graphdef, weights = nnx.split(moe.experts)
    found = experts(
        lambda w, r: nnx.merge(graphdef, w)(r),
        weights,
        rows,
        routing.choice,
        routing.gate,
    )
    np.testing.assert_array_equal(found.reshape(X.shape), moe(X).output)
