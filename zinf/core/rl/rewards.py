"""Rewards of completions: read from reward functions, joined, and less a KL penalty.

All are float64 on the host. NaN stands for a reward that is missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zinf.core.rl.advantages import EPSILON, grouped, nan_mean, nan_std


def as_rewards(
    name: str, values: Any, num_completions: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """What a reward function returned, float64 (completions,), NaN where missing.

    Args:
        name: of the function, for messages.
        values: a reward or None for each completion.
        num_completions: how many rewards there must be.

    Returns:
        The rewards, and the numbers of completions whose reward is NaN or infinite.
        Those are left out as None is, but a caller should say so.

    Raises:
        ValueError: there are more or fewer rewards than completions, or one is neither
            a number nor None.
    """
    found = list(values) if hasattr(values, "__iter__") else None
    if found is None or len(found) != num_completions:
        count = f"a {type(values).__name__}" if found is None else len(found)
        raise ValueError(
            f"The reward function {name!r} returned {count}; it must return a list of "
            f"{num_completions} rewards, one for each completion, in their order."
        )
    rewards = np.full(num_completions, np.nan)
    for number, value in enumerate(found):
        if value is None:
            continue
        try:
            rewards[number] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The reward function {name!r} returned {value!r:.40} for completion "
                f"{number}; a reward is a number, or None to leave the completion out."
            ) from error
    is_given = np.array([value is not None for value in found], bool)
    wrong = np.flatnonzero(is_given & ~np.isfinite(rewards))
    rewards[wrong] = np.nan
    return rewards, tuple(int(number) for number in wrong)


def combined(
    rewards: Mapping[str, np.ndarray], weights: Sequence[float] | None = None
) -> np.ndarray:
    """The weighted sum of several rewards, (completions,).

    A missing reward counts as 0. A completion that every function left out has NaN.

    Args:
        rewards: (completions,) of each reward function, by its name.
        weights: of the functions, in their order; None: 1 each.

    Raises:
        ValueError: there is no function, a weight is missing or not finite, or no
            completion has any reward.
    """
    stacked = _stacked(rewards)
    total = np.nansum(stacked * _weights(rewards, weights), axis=1)
    return np.where(np.isnan(stacked).all(axis=1), np.nan, total)


def combined_advantages(
    rewards: Mapping[str, np.ndarray],
    group_size: int,
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """Advantages of several rewards, each normalized by itself, (completions,).

    GDPO, https://arxiv.org/abs/2601.05242: each reward is scaled within its group, then
    the weighted sum within the batch. A reward of large values does not drown others.

    Args:
        rewards, weights: as for `combined`.
        group_size: number of completions of a prompt, which follow each other.

    Raises:
        ValueError: see `combined` and `grpo_advantages`.
    """
    stacked = _stacked(rewards)
    columns = []
    for values in stacked.T:
        groups = grouped(values, group_size)
        centred = groups - nan_mean(groups, axis=1)
        columns.append((centred / (nan_std(groups, axis=1) + EPSILON)).reshape(-1))
    total = np.nansum(np.stack(columns, axis=1) * _weights(rewards, weights), axis=1)
    # As in TRL, a reward alone in its group counts as 0 here, and a missing one not.
    total = np.where(np.isnan(stacked).all(axis=1), np.nan, total)
    scaled = (total - nan_mean(total)) / (nan_std(total) + EPSILON)
    return np.nan_to_num(scaled, nan=0.0)


def with_kl(
    rewards: np.ndarray,
    logps: np.ndarray,
    ref_logps: np.ndarray,
    mask: np.ndarray,
    beta: float,
) -> np.ndarray:
    """Rewards less `beta` times the KL divergence from the reference: those of RLOO.

    The estimate is k1: the sum over tokens of logps - ref_logps.

    Args:
        rewards: (completions,).
        logps, ref_logps: of the tokens, (completions, tokens).
        mask: 1 for tokens of the completion, (completions, tokens).
    """
    difference = np.where(
        mask != 0,
        np.asarray(logps, np.float64) - np.asarray(ref_logps, np.float64),
        0.0,
    )
    return rewards - beta * difference.sum(axis=1)


def reward_metrics(
    rewards: Mapping[str, np.ndarray],
    total: np.ndarray,
    group_size: int,
) -> dict[str, float]:
    """Statistics of a batch's rewards, under TRL's names.

    Args:
        rewards: (completions,) of each reward function, by its name.
        total: (completions,), of `combined`.
        group_size: number of completions of a prompt, which follow each other; 1 has no
            deviation within groups.
    """
    metrics = {
        "reward": float(nan_mean(total)),
        "reward_std": float(nan_std(total)),
    }
    if group_size > 1:
        deviations = nan_std(grouped(total, group_size), axis=1)
        metrics["frac_reward_zero_std"] = float(np.isclose(deviations, 0).mean())
    for name, values in rewards.items():
        metrics[f"rewards/{name}/mean"] = float(nan_mean(values))
        metrics[f"rewards/{name}/std"] = float(nan_std(values))
    return metrics


def _stacked(rewards: Mapping[str, np.ndarray]) -> np.ndarray:
    """(completions, functions)."""
    if not rewards:
        raise ValueError("There is no reward function. Give at least one.")
    stacked = np.stack([np.asarray(x, np.float64) for x in rewards.values()], axis=1)
    if np.isnan(stacked).all():
        raise ValueError(
            f"No completion of this batch has a reward: {', '.join(rewards)} left out "
            f"all {len(stacked)} completions. Return a number for some of them."
        )
    return stacked


def _weights(
    rewards: Mapping[str, np.ndarray], weights: Sequence[float] | None
) -> np.ndarray:
    if weights is None:
        return np.ones(len(rewards))
    if len(weights) != len(rewards):
        raise ValueError(
            f"reward_weights has {len(weights)} numbers for {len(rewards)} reward "
            f"functions ({', '.join(rewards)}). Give one for each."
        )
    found = np.asarray(weights, np.float64)
    if not np.isfinite(found).all():
        raise ValueError(
            f"reward_weights has a number that is not finite: {list(weights)}."
        )
    return found
