"""Losses, advantages and ratios are those of TRL and DeepSpeed-Chat, as recorded."""

from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core import rl

# Made by scripts/reports/record_rl.py from TRL 1.16.0 and DeepSpeed-Chat at 45b4b71.
RECORD = np.load(Path(__file__).with_name("originals.npz"))
CASES = {str(name): number for number, name in enumerate(RECORD["cases"])}
MASK = RECORD["mask"]
GROUP, MAX_LENGTH = 4, 7
# Of the script: settings of each variant, and rows of a step if it is split.
VARIANTS = {
    "plain": {},
    "on_policy": {},
    "higher": {"epsilon_high": 0.28},
    "two_sided": {"epsilon_high": 0.28, "delta": 1.4},
    "kl": {"beta": 0.04},
    "kl_corrected": {"beta": 0.04, "use_bias_correction_kl": True},
    "token_ratio": {"beta": 0.04},
    "sequence_ratio": {"beta": 0.04},
    "entropy": {"beta": 0.04},
}
ROWS_OF_STEP = {"whole": 8, "split": 4}
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def arrays(loss_type: str, variant: str) -> dict[str, np.ndarray]:
    """The batch of all recorded rows, as a user makes it."""
    weights, denominators = rl.token_weights(
        MASK, loss_type, max_completion_length=MAX_LENGTH
    )
    batch = {
        "weights": weights,
        "denominators": denominators,
        "advantages": RECORD["advantages"][:, None] * np.ones_like(MASK),
        "old_logps": RECORD["old_logps"],
        "ref_logps": RECORD["ref_logps"],
    }
    if variant == "on_policy":
        del batch["old_logps"]
    if variant.endswith("ratio"):
        ratios = RECORD[variant] * np.ones_like(MASK)
        name = "importance_ratios" if loss_type == "vespo" else "policy_weights"
        batch[name] = ratios
    if variant == "entropy":
        batch["policy_weights"] = rl.entropy_mask(RECORD["entropies"], MASK, 0.4)
    return {name: np.float32(x) for name, x in batch.items()}


def differentiated(loss_fn, outputs: np.ndarray, batch) -> tuple[jax.Array, jax.Array]:
    """The mean of a loss and its gradient by what a model gave."""
    mean = lambda outputs: loss_fn(outputs, batch)[0].mean  # noqa: E731
    return jax.value_and_grad(mean)(jnp.asarray(outputs))


@pytest.mark.parametrize("loss_type", rl.LOSS_TYPES)
def test_losses_and_gradients_are_those_of_trl(loss_type):
    """Every level, clipping, KL term and correction, with a row without tokens."""
    names = [name for name in CASES if name.startswith(f"{loss_type}/")]
    assert len(names) >= 8
    for name in names:
        _, level, variant, split = name.split("/")
        settings = {"importance_sampling_level": level, **VARIANTS[variant]}
        loss_fn = rl.PolicyLoss(loss_type, **settings)
        batch = arrays(loss_type, variant)
        rows = ROWS_OF_STEP[split]
        losses, grads = [], []
        for start in range(0, len(MASK), rows):
            part = {n: x[start : start + rows] for n, x in batch.items()}
            logps = RECORD["logps"][start : start + rows]
            loss, grad = differentiated(loss_fn, logps, part)
            losses.append(loss)
            grads.append(grad)
        number = CASES[name]
        expected = RECORD["losses"][number][: len(losses)]
        np.testing.assert_allclose(losses, expected, **ROUNDING, err_msg=name)
        found = np.concatenate(grads)
        np.testing.assert_allclose(
            found, RECORD["grads"][number], **ROUNDING, err_msg=name
        )


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith("token/kl/split")])
def test_metrics_are_those_of_trl(name):
    """Those of the last microbatch of the record, which has two rows."""
    loss_type = name.partition("/")[0]
    batch = {n: x[6:] for n, x in arrays(loss_type, "kl").items()}
    loss_fn = rl.PolicyLoss(loss_type, beta=0.04)
    logps, entropies = (jnp.asarray(RECORD[n][6:]) for n in ("logps", "entropies"))
    found = rl.metric_values(loss_fn(logps, batch, entropies=entropies)[1])
    recorded = zip(RECORD["metric_names"], RECORD["metrics"][CASES[name]], strict=True)
    expected = {str(n): x for n, x in recorded if np.isfinite(x)}
    assert found == pytest.approx(expected, rel=1e-6)


def test_rloo_is_that_of_trl():
    """One ratio a sequence, and the mean over sequences."""
    mask = RECORD["rloo/mask"]
    weights, denominators = rl.token_weights(mask, "grpo")
    batch = {
        "weights": weights,
        "denominators": denominators,
        "advantages": RECORD["advantages"][:, None] * mask,
        "old_logps": RECORD["old_logps"],
    }
    loss_fn = rl.PolicyLoss("grpo", "sequence_product")
    loss, grad = differentiated(loss_fn, RECORD["logps"], batch)
    np.testing.assert_allclose(loss, RECORD["rloo/loss"], **ROUNDING)
    np.testing.assert_allclose(grad, RECORD["rloo/grad"], **ROUNDING)


def test_advantages_are_those_of_trl():
    """Of two weighted rewards, some missing; GRPO's scales, GDPO, and RLOO with KL."""
    columns = dict(zip("ab", np.float64(RECORD["rewards"]).T, strict=True))
    weights = RECORD["reward_weights"]
    total = rl.combined(columns, weights)
    found = {
        f"advantages/sum_then_normalize/{scale}": rl.grpo_advantages(
            total, GROUP, scale
        )
        for scale in ("group", "batch", "none")
    }
    found["advantages/normalize_then_sum/group"] = rl.combined_advantages(
        columns, GROUP, weights
    )
    tokens = [RECORD[f"kl/{n}"] for n in ("logps", "ref_logps", "mask")]
    for beta, normalize in product((0.0, 0.05), (False, True)):
        rewards = rl.with_kl(total, *tokens, beta)
        found[f"rloo_advantages/{beta}/{normalize}"] = rl.rloo_advantages(
            rewards, GROUP, normalize=normalize
        )
    for name, advantages in found.items():
        np.testing.assert_allclose(advantages, RECORD[name], **ROUNDING, err_msg=name)


@pytest.mark.parametrize("mode", rl.IMPORTANCE_MODES)
def test_importance_ratios_are_those_of_trl(mode):
    given = [RECORD[n] for n in ("old_logps", "sampler_logps")]
    for floor in (None, 0.5):
        found = rl.importance_correction(*given, MASK, mode, cap=1.5, floor=floor)
        expected = np.broadcast_to(RECORD[f"ratios/{mode}/{floor}"], MASK.shape)
        np.testing.assert_allclose(found, expected, **ROUNDING)


def test_ppo_is_that_of_deepspeed_chat():
    """Rewards, advantages, and the losses of actor and critic.

    DeepSpeed's mask of attention drops the token that ends an answer, as it drops
    padding; its rewards have one token more, where there is one.
    """
    names = ("attention", "old_logps", "ref_logps", "logps", "old_values", "values")
    start = int(RECORD["ppo/prompt"]) - 1
    whole = {name: RECORD[f"ppo/{name}"] for name in names}
    mask = whole["attention"][:, 1:][:, start:]
    given = {n: np.float32(x[:, start:]) for n, x in whole.items() if n != "attention"}
    num_tokens = mask.sum(1, keepdims=True)
    with_end = np.arange(mask.shape[1]) < num_tokens + 1
    rewards = rl.token_rewards(
        *(RECORD["ppo/scores"], given["old_logps"], given["ref_logps"], with_end),
        kl_coef=0.1,
        clip=5.0,
    )
    expected = {
        name: RECORD[f"ppo/{name}"] for name in ("old_rewards", "advantages", "returns")
    }
    np.testing.assert_allclose(rewards, expected["old_rewards"][:, start:], **ROUNDING)
    advantages, returns = rl.generalized_advantages(
        rewards, given["old_values"], with_end
    )
    np.testing.assert_allclose(advantages, expected["advantages"], **ROUNDING)
    np.testing.assert_allclose(returns, expected["returns"], **ROUNDING)
    weights, denominators = rl.token_weights(mask, "dapo")
    batch = {
        "weights": weights,
        "denominators": denominators,
        "advantages": np.float32(advantages),
        "returns": np.float32(returns),
        **{name: given[name] for name in ("old_logps", "old_values")},
    }
    for name, loss_fn, model in (
        ("actor", rl.PolicyLoss(), given["logps"]),
        ("critic", rl.ValueLoss(), given["values"]),
    ):
        loss, grad = differentiated(loss_fn, model, batch)
        np.testing.assert_allclose(loss, RECORD[f"ppo/{name}"], **ROUNDING)
        expected_grad = RECORD[f"ppo/{name}_grad"][:, start:]
        np.testing.assert_allclose(grad, expected_grad, **ROUNDING)
    # Both in one loss, as TRL has it.
    both, metrics = rl.ActorCriticLoss(vf_coef=0.1)(
        given["logps"], given["values"], batch
    )
    wanted = RECORD["ppo/actor"] + 0.1 * RECORD["ppo/critic"]
    np.testing.assert_allclose(both.mean, wanted, **ROUNDING)
    named = rl.metric_values(metrics)
    np.testing.assert_allclose(
        (named["loss/policy_avg"], named["loss/value_avg"]),
        (RECORD["ppo/actor"], RECORD["ppo/critic"]),
        **ROUNDING,
    )


def test_whitening_is_that_of_trl():
    for shift in (False, True):
        found = rl.whitened(RECORD["logps"], MASK, shift_mean=shift)
        np.testing.assert_allclose(
            found, RECORD[f"whitened/{shift}"] * MASK, **ROUNDING
        )
