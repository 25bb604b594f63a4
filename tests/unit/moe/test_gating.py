"""Gates and dropped tokens are DeepSpeed's, on recorded logits and draws."""

from pathlib import Path

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
FACTORS = {"ample": 4.0, "tight": 0.5, "all": None}
MIN_CAPACITY = 4
# Softmax and its sum in float32, by two libraries: a few units of the last place.
ROUNDING = {"rtol": 4e-6, "atol": 1e-7}
# Without draws DeepSpeed picks the tokens that an expert keeps by a top-k of equal
# numbers, whose order torch leaves open. Here the first tokens are kept, and only how
# many each expert keeps can be compared.
IS_OPEN = "top1/tight/None/False"


def capacity(label: str, k: int) -> int | None:
    if FACTORS[label] is None:
        return None
    return capacity_of(NUM_TOKENS, NUM_EXPERTS, FACTORS[label] * k, MIN_CAPACITY)


def routed(name: str, logits: np.ndarray = LOGITS) -> Routing:
    """The routing that a record is named for: gating, capacity, and its options."""
    gating, label, *options = name.split("/")
    if gating == "top1":
        noise, rts = options or ("None", "False")
        draws = {
            "gumbel": RECORD["gumbel"] if noise == "RSample" else None,
            "uniform": RECORD["uniform"] if rts == "True" else None,
        }
        return jax.jit(lambda x: top1(x, capacity=capacity(label, 1), **draws))(logits)
    if gating == "top2":
        gumbel = RECORD["gumbel"] if options == ["True"] else None
        given = {"capacity": capacity(label, 2), "gumbel": gumbel}
        return jax.jit(lambda x: top2(x, **given))(logits)
    k, policy = int(options[0]), (options[1:] or ["probs"])[0]
    given = {"capacity": capacity(label, k), "drop_policy": policy}
    return jax.jit(lambda x: top_k(x, k, **given))(logits)


def dense(routing: Routing) -> np.ndarray:
    """The gate of each token for each expert, as DeepSpeed's combine weights sum up."""
    gates = np.zeros((NUM_TOKENS, NUM_EXPERTS), np.float32)
    choice, gate = map(np.asarray, (routing.choice, routing.gate))
    assert not gate[choice == NO_EXPERT].any()
    tokens, column = np.nonzero(choice != NO_EXPERT)
    np.add.at(gates, (tokens, choice[tokens, column]), gate[tokens, column])
    return gates


NAMES = [
    *("top1/all", "top1/ample/None/False", "top1/tight/None/True", IS_OPEN),
    "top1/tight/RSample/True",
    *("top2/all", "top2/ample/False", "top2/tight/False", "top2/tight/True"),
    *("topk/all/4", "topk/ample/4/probs", "topk/tight/1/probs"),
    *("topk/tight/2/probs", "topk/tight/2/position", "topk/tight/4/position"),
]


@pytest.mark.parametrize("name", NAMES)
def test_routes_are_those_of_deepspeed(name: str) -> None:
    routing, wanted = routed(name), RECORD[f"{name}/gates"]
    found = dense(routing)
    if name == IS_OPEN:
        np.testing.assert_array_equal((found > 0).sum(0), (wanted > 0).sum(0))
        chosen, kept = (
            np.asarray(x.choice[:, 0]) for x in (routed("top1/all"), routing)
        )
        for expert in range(NUM_EXPERTS):
            first = np.flatnonzero(chosen == expert)[: capacity("tight", 1)]
            np.testing.assert_array_equal(np.flatnonzero(kept == expert), first)
    else:
        np.testing.assert_array_equal(found > 0, wanted > 0)
        np.testing.assert_allclose(found, wanted, **ROUNDING)
    np.testing.assert_array_equal(routing.counts, RECORD[f"{name}/counts"])
    np.testing.assert_allclose(routing.aux_loss, RECORD[f"{name}/aux_loss"], rtol=1e-6)
    assert "/all" not in name or float(routing.dropped) == 0


@pytest.mark.parametrize("name", ["top1/all", "top2/all", "topk/all/4"])
def test_nan_logits_reach_the_loss(name: str) -> None:
    logits = LOGITS.copy()
    logits[3, 2] = np.nan
    assert np.isnan(routed(name, logits).aux_loss)


def test_z_loss_is_the_mean_square_of_log_z_and_gates_have_gradients() -> None:
    logits = np.log(np.full((5, 4), 1 / 4, np.float32))
    np.testing.assert_allclose(z_loss(logits), 0.0, atol=1e-12)
    np.testing.assert_allclose(z_loss(logits + 3), 9.0, rtol=1e-6)

    @jax.jit
    @jax.grad
    def gradient(logits: jax.Array) -> jax.Array:
        routing = top2(logits, capacity=8)
        return jnp.sum(routing.gate**2) + routing.aux_loss

    found = gradient(jnp.asarray(LOGITS))
    assert jnp.isfinite(found).all() and jnp.abs(found).max() > 0
