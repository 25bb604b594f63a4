"""Advantages of completions from the rewards of their group, float64 on the host."""

import numpy as np

# Added to a standard deviation before dividing by it, as TRL does.
EPSILON = 1e-4
SCALES = ("group", "batch", "none")


def grpo_advantages(
    rewards: np.ndarray, group_size: int, scale_rewards: str | bool = "group"
) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation + 1e-4), (completions,).

    Section 4.1.2 of https://arxiv.org/abs/2402.03300; standard deviations are unbiased.
    A completion without a reward is left out of its group, and has the advantage 0.

    Args:
        rewards: (completions,), NaN where missing; those of a prompt follow each other.
        group_size: number of completions of a prompt.
        scale_rewards: of what the standard deviation is: "group", "batch", or "none" to
            divide by nothing (https://arxiv.org/abs/2503.20783). True and False are
            "group" and "none".

    Raises:
        ValueError: groups are of one completion or do not divide the rewards, a reward
            is infinite, or there is no such scale.
    """
    by_flag = {True: "group", False: "none"}
    scale = by_flag[scale_rewards] if scale_rewards in by_flag else scale_rewards
    if scale not in SCALES:
        raise ValueError(
            f"scale_rewards is {scale_rewards!r}; it is one of {', '.join(SCALES)}."
        )
    groups = grouped(rewards, group_size)
    advantages = groups - nan_mean(groups, axis=1)
    if scale != "none":
        axis = 1 if scale == "group" else None
        advantages = advantages / (nan_std(groups, axis=axis) + EPSILON)
    return np.nan_to_num(advantages.reshape(-1), nan=0.0)


def rloo_advantages(
    rewards: np.ndarray, group_size: int, *, normalize: bool = False
) -> np.ndarray:
    """The reward less the mean of the others of its group, (completions,).

    Section 3 of https://arxiv.org/abs/2402.14740. A completion without a reward, or
    without another of its group that has one, has the advantage 0.

    Args:
        rewards, group_size: as for `grpo_advantages`; `with_kl` has the penalty.
        normalize: whether advantages are shifted and scaled to the mean 0 and the
            standard deviation 1 over the batch.

    Raises:
        ValueError: see `grpo_advantages`.
    """
    groups = grouped(rewards, group_size)
    has_reward = ~np.isnan(groups)
    num_others = has_reward.sum(axis=1, keepdims=True) - 1
    others = np.nansum(groups, axis=1, keepdims=True) - groups
    is_known = has_reward & (num_others > 0)
    baselines = others / np.maximum(num_others, 1)
    advantages = np.where(is_known, groups - baselines, np.nan).reshape(-1)
    if normalize:
        spread = nan_std(advantages) + EPSILON
        advantages = (advantages - nan_mean(advantages)) / spread
    return np.nan_to_num(advantages, nan=0.0)


def grouped(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Rewards as float64 (groups, group_size).

    Raises:
        ValueError: see `grpo_advantages`.
    """
    rewards = np.asarray(rewards, np.float64).reshape(-1)
    if group_size < 2:
        raise ValueError(
            f"num_generations is {group_size}: a completion is compared with others of "
            "the same prompt, so a prompt needs at least 2."
        )
    if not len(rewards) or len(rewards) % group_size:
        raise ValueError(
            f"{len(rewards)} rewards are not groups of {group_size} (num_generations). "
            "Give as many completions of every prompt."
        )
    if np.isinf(rewards).any():
        number = int(np.flatnonzero(np.isinf(rewards))[0])
        raise ValueError(
            f"The reward of completion {number} is {rewards[number]}. Rewards are "
            "finite, or None to leave a completion out."
        )
    return rewards.reshape(-1, group_size)


def nan_mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean without NaN, dims kept if there is an axis; NaN if all are."""
    count = np.sum(~np.isnan(values), axis=axis, keepdims=axis is not None)
    total = np.nansum(values, axis=axis, keepdims=axis is not None)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def nan_std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The unbiased standard deviation without NaN; NaN if fewer than two are left."""
    count = np.sum(~np.isnan(values), axis=axis, keepdims=axis is not None)
    square = np.square(values - nan_mean(values, axis))
    total = np.nansum(square, axis=axis, keepdims=axis is not None)
    return np.where(count > 1, np.sqrt(total / np.maximum(count - 1, 1)), np.nan)
