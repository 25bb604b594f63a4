"""Completions as rows of tokens, and the weight of each token in the loss of a step.

A loss from rewards is a sum over tokens of weight times loss. The kinds of GRPO differ
in these weights, which are made here, with the batch: microbatches, devices and packing
cannot change them.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

TokenIds = Sequence[Sequence[int]]


def is_truncated(completions: TokenIds, end_tokens: Collection[int]) -> np.ndarray:
    """Whether each completion stopped for its length, bool (completions,).

    A completion has ended if its last token is any of the tokens that end a text. A
    model has several of them more often than not.

    Args:
        completions: token ids as they were drawn, with the token that ended them.
        end_tokens: all tokens at which sampling stops.
    """
    ends = frozenset(int(token) for token in end_tokens)
    return np.array([bool(len(c)) and int(c[-1]) not in ends for c in completions])


def token_rows(
    prompts: TokenIds,
    completions: TokenIds,
    length: int,
    *,
    padding: int = 0,
    own: Sequence[Sequence[int]] | None = None,
    kept: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and completions as rows padded on the right, and a mask.

    The mask comes from the lengths: padding may be a token that ends texts.

    Args:
        prompts, completions: token ids, as they were sampled from.
        length: tokens of a row.
        padding: the token of the rest of a row.
        own: for each completion, 1 for tokens that the model drew and 0 for others,
            such as results of tools; None: it drew all.
        kept: bool (completions,); the mask of others is 0, such as of truncated ones.

    Returns:
        Tokens, int32 (completions, length), and the mask, float32
        (completions, length - 1): entry t is 1 if token t + 1 is the model's own. So
        does `engine.log_probabilities` place the log-probability of token t + 1.

    Raises:
        ValueError: a prompt is empty or does not fit a row with its completion, or
            numbers of completions, or of tokens in `own`, differ.
    """
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts have {len(completions)} completions. Repeat a "
            "prompt for each of its completions."
        )
    tokens = np.full((len(prompts), length), padding, np.int32)
    mask = np.zeros((len(prompts), length - 1), np.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, stop = len(prompt), len(prompt) + len(completion)
        if not start or stop > length:
            raise ValueError(
                f"Row {row} has {start} tokens of prompt and {stop - start} of "
                f"completion; a prompt has at least one, and both together have at "
                f"most {length}."
            )
        drawn = np.ones(stop - start) if own is None else np.asarray(own[row])
        if len(drawn) != stop - start:
            raise ValueError(
                f"Row {row} has {stop - start} tokens of completion, and `own` marks "
                f"{len(drawn)} of them."
            )
        tokens[row, :stop] = [*prompt, *completion]
        if kept is None or kept[row]:
            mask[row, start - 1 : stop - 1] = drawn != 0
    return tokens, mask


def token_weights(
    mask: np.ndarray,
    loss_type: str = "dapo",
    *,
    max_completion_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights of tokens, and what each row adds to the denominator of a step's loss.

    The loss of a step is `sum(weights * losses) / sum(denominators)`, over its rows.
    A batch of several steps is weighted whole: dapo divides by the mean number of
    tokens of a step, as TRL does, and bnpo by that of the step itself. In TRL bnpo
    divides by the tokens of a microbatch; here microbatches have no part in it.

    Args:
        mask: 1 for tokens of the loss, (completions, tokens), of all rows together.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: the constant length that dr_grpo divides by.

    Returns:
        float32 (completions, tokens) and float32 (completions,).

    Raises:
        ValueError: there is no such loss, or dr_grpo has no length.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type is {loss_type!r}; it is one of {', '.join(LOSS_TYPES)}."
        )
    if loss_type == "dr_grpo" and not max_completion_length:
        raise ValueError(
            "loss_type dr_grpo divides by max_completion_length, which is "
            f"{max_completion_length}. Give the number of tokens of a completion."
        )
    mask = np.asarray(mask != 0, np.float64)
    weights, denominators = LOSS_TYPES[loss_type](mask, max_completion_length or 0)
    return weights.astype(np.float32), denominators.astype(np.float32)


Aggregation = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def _mean_of_means(mask: np.ndarray, _: int) -> tuple[np.ndarray, np.ndarray]:
    """Each completion counts alike, whatever its length."""
    return mask / np.maximum(mask.sum(1, keepdims=True), 1), np.ones(len(mask))


def _mean_of_tokens(mask: np.ndarray, _: int) -> tuple[np.ndarray, np.ndarray]:
    """Each token counts alike; steps of one batch divide by the same number."""
    mean = max(mask.sum(), 1) / len(mask)
    return mask, np.full(len(mask), mean)


def _mean_of_step(mask: np.ndarray, _: int) -> tuple[np.ndarray, np.ndarray]:
    """Each token counts alike; a step divides by its own tokens."""
    return mask, mask.sum(1) if mask.any() else np.full(len(mask), 1 / len(mask))


def _by_constant(mask: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums over tokens, divided by the longest possible length."""
    return mask, np.full(len(mask), float(length))


def _sum_of_tokens(mask: np.ndarray, _: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums over tokens: a completion counts by its length."""
    return mask, np.ones(len(mask))


LOSS_TYPES: dict[str, Aggregation] = {
    "grpo": _mean_of_means,  # https://arxiv.org/abs/2402.03300
    "bnpo": _mean_of_step,
    "dapo": _mean_of_tokens,  # https://arxiv.org/abs/2503.14476
    "dr_grpo": _by_constant,  # https://arxiv.org/abs/2503.20783
    "cispo": _mean_of_tokens,  # https://arxiv.org/abs/2506.13585
    "sapo": _mean_of_means,  # https://arxiv.org/abs/2511.20347
    "luspo": _sum_of_tokens,  # https://arxiv.org/abs/2602.05261
    "vespo": _mean_of_tokens,  # https://arxiv.org/abs/2602.10693
}
