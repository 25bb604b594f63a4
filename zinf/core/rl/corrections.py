"""Factors of the policy's loss for each token, float64 on the host.

They multiply the policy's term and not the KL divergence, so they are no weights.
"""

import numpy as np

# What a ratio is of, and what becomes of one out of range: TRL's names.
IMPORTANCE_MODES = (
    *("token_truncate", "token_mask"),
    *("sequence_truncate", "sequence_mask"),
)


def importance_correction(
    old_logps: np.ndarray,
    sampler_logps: np.ndarray,
    mask: np.ndarray,
    mode: str = "sequence_mask",
    *,
    cap: float | None = 3.0,
    floor: float | None = None,
) -> np.ndarray:
    """exp(old_logps - sampler_logps), of tokens or their product, (rows, tokens).

    It corrects for a sampler whose probabilities are not those of training: other
    executables round differently, and filters as top_p remove tokens. A token whose
    sampler's log-probability is NaN has the ratio 1.

    Args:
        old_logps: of the model that is trained, as it was when it sampled.
        sampler_logps: of the tokens when they were drawn.
        mask: 1 for tokens of the loss.
        mode: one of `IMPORTANCE_MODES`: truncate moves a ratio out of range to the
            nearest in range, mask makes it 0.
        cap, floor: range of ratios; None: no limit.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in IMPORTANCE_MODES:
        raise ValueError(
            f"The mode of importance correction is {mode!r}; it is one of "
            f"{', '.join(IMPORTANCE_MODES)}."
        )
    difference = _difference(old_logps, sampler_logps, mask)
    level, _, treatment = mode.partition("_")
    if level == "sequence":
        difference = np.repeat(
            difference.sum(1, keepdims=True), difference.shape[1], axis=1
        )
    # Ratios beyond the largest float are out of any range.
    with np.errstate(over="ignore"):
        ratios = np.exp(difference)
    low = -np.inf if floor is None else floor
    high = np.inf if cap is None else cap
    if treatment == "truncate":
        return np.clip(ratios, low, high)
    return np.where((ratios < low) | (ratios > high), 0.0, ratios)


def difference_metrics(
    old_logps: np.ndarray, sampler_logps: np.ndarray, mask: np.ndarray
) -> dict[str, float]:
    """How far the sampler is from the trainer on the tokens drawn, in TRL's names."""
    sampler = np.asarray(sampler_logps, np.float64)
    is_known = (np.asarray(mask) != 0) & ~np.isnan(sampler)
    found = np.abs(_difference(old_logps, sampler, mask))[is_known]
    return {
        "sampling/sampling_logp_difference/mean": float(found.mean())
        if len(found)
        else 0.0,
        "sampling/sampling_logp_difference/max": float(found.max(initial=0.0)),
    }


def entropy_mask(
    entropies: np.ndarray, mask: np.ndarray, top_quantile: float
) -> np.ndarray:
    """1 for the share of tokens of highest entropy, (rows, tokens).

    https://arxiv.org/abs/2506.01939. The threshold is over all given tokens, so give
    those of the whole step.

    Args:
        entropies: of the distribution that each token was drawn from, in nats.
        mask: 1 for tokens of the loss.
        top_quantile: the share of tokens that are kept, over 0 to 1.

    Raises:
        ValueError: `top_quantile` is out of range.
    """
    if not 0 < top_quantile <= 1:
        raise ValueError(
            f"top_entropy_quantile is {top_quantile}; it has to be over 0, and 1 keeps "
            "all tokens."
        )
    is_token = np.asarray(mask) != 0
    # Comparisons are in the dtype of the entropies, as the quantile is one of them.
    entropies = np.asarray(entropies, np.float32)
    if not is_token.any():
        return np.zeros(is_token.shape)
    threshold = np.quantile(entropies[is_token], np.float32(1 - top_quantile))
    is_kept = is_token & (entropies >= threshold)
    return is_kept.astype(np.float64)


def _difference(
    old_logps: np.ndarray, sampler_logps: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    difference = np.asarray(old_logps, np.float64) - np.asarray(
        sampler_logps, np.float64
    )
    return np.nan_to_num(np.where(np.asarray(mask) != 0, difference, 0.0), nan=0.0)
