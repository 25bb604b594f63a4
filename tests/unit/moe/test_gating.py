"""Gates and dropped tokens are DeepSpeed's, on recorded logits and draws."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.moe.gating import (
    NO_EXPERT,
    Routing,
    capacity_of,
    top1,
    top2,
    top_k,
    z_loss,
)

# Made by scripts/reports/record_gating.py from DeepSpeed 0.19.6.
RECORD = np.load(Path(__file__).with_name("gating.npz"))
LOGITS = RECORD["logits"]
NUM_TOKENS, NUM_EXPERTS = LOGITS.shape
FACTORS = {"ample": 4.0, "tight": 0.5}
MIN_CAPACITY = 4
# Softmax and its sum in float32, by two libraries: a few units of the last place.
ROUNDING = {"rtol": 4e-6, "atol": 1e-7}


def capacity(label: str, k: int) -> int:
    return capacity_of(NUM_TOKENS, NUM_EXPERTS, FACTORS[label] * k, MIN_CAPACITY)


def dense(routing: Routing) -> np.ndarray:
    """The gate of each token for each expert, as DeepSpeed's combine weights sum up."""
    gates = np.zeros((NUM_TOKENS, NUM_EXPERTS), np.float32)
    for token, chosen in enumerate(np.asarray(routing.choice)):
        for expert, value in zip(chosen, routing.gate[token], strict=True):
            if expert != NO_EXPERT:
                gates[token, expert] += value
            else:
                assert value == 0
    return gates


def expect(name: str, routing: Routing, *, same_tokens: bool = True) -> None:
    wanted = RECORD[f"{name}/gates"]
    found = dense(routing)
    if same_tokens:
        np.testing.assert_array_equal(found > 0, wanted > 0)
        np.testing.assert_allclose(found, wanted, **ROUNDING)
    else:
        np.testing.assert_array_equal((found > 0).sum(0), (wanted > 0).sum(0))
    np.testing.assert_array_equal(routing.counts, RECORD[f"{name}/counts"])
    np.testing.assert_allclose(routing.aux_loss, RECORD[f"{name}/aux_loss"], rtol=1e-6)


@pytest.mark.parametrize("label", FACTORS)
@pytest.mark.parametrize("noise", [None, "RSample"])
@pytest.mark.parametrize("rts", [False, True])
def test_top1_is_deepspeed_s(label: str, noise: str | None, rts: bool) -> None:
    draws = {
        "gumbel": RECORD["gumbel"] if noise else None,
        "uniform": RECORD["uniform"] if rts else None,
    }
    routing = top1(LOGITS, capacity=capacity(label, 1), **draws)
    # Without draws DeepSpeed picks the tokens that an expert keeps by a top-k of equal
    # numbers, whose order torch leaves open. Here it is the first tokens, and only how
    # many each expert keeps can be compared.
    is_open = label == "tight" and not rts
    expect(f"top1/{label}/{noise}/{rts}", routing, same_tokens=not is_open)
    if is_open:
        wanted = np.asarray(top1(LOGITS, capacity=None, **draws).choice[:, 0])
        for expert in range(NUM_EXPERTS):
            first = np.flatnonzero(wanted == expert)[: capacity(label, 1)]
            kept = np.flatnonzero(np.asarray(routing.choice[:, 0]) == expert)
            np.testing.assert_array_equal(kept, first)


@pytest.mark.parametrize("label", FACTORS)
@pytest.mark.parametrize("sampling", [False, True])
def test_top2_is_deepspeed_s(label: str, sampling: bool) -> None:
    gumbel = RECORD["gumbel"] if sampling else None
    routing = top2(LOGITS, capacity=capacity(label, 2), gumbel=gumbel)
    expect(f"top2/{label}/{sampling}", routing)


@pytest.mark.parametrize("label", FACTORS)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_top_k_is_deepspeed_s(label: str, k: int, policy: str) -> None:
    routing = top_k(LOGITS, k, capacity=capacity(label, k), drop_policy=policy)
    expect(f"topk/{label}/{k}/{policy}", routing)


def test_without_capacity_no_token_is_dropped() -> None:
    expect("top1/all", top1(LOGITS, capacity=None))
    expect("top2/all", top2(LOGITS, capacity=None))
    expect("topk/all/4", top_k(LOGITS, 4, capacity=None))
    for routing in (top1(LOGITS, capacity=None), top_k(LOGITS, 4, capacity=None)):
        assert float(routing.dropped) == 0


@pytest.mark.slow
def test_gates_have_gradients_and_draws_none() -> None:
    def loss(logits: jax.Array) -> jax.Array:
        routing = top2(logits, capacity=8)
        return jnp.sum(routing.gate**2) + routing.aux_loss

    gradient = jax.grad(loss)(jnp.asarray(LOGITS))
    chex.assert_tree_all_finite(gradient)
    assert float(jnp.abs(gradient).max()) > 0


def test_nan_logits_reach_the_loss() -> None:
    logits = LOGITS.copy()
    logits[3, 2] = np.nan
    for routing in (
        top1(logits, capacity=None),
        top2(logits, capacity=None),
        top_k(logits, 4, capacity=None),
    ):
        assert np.isnan(routing.aux_loss)


def test_z_loss_is_the_mean_square_of_log_z() -> None:
    logits = np.log(np.full((5, 4), 1 / 4, np.float32))
    np.testing.assert_allclose(z_loss(logits), 0.0, atol=1e-12)
    np.testing.assert_allclose(z_loss(logits + 3), 9.0, rtol=1e-6)
