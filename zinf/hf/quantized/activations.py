"""Rounds weights by the size of the inputs that they see: AWQ's two searches.

https://arxiv.org/abs/2306.00978, section 3.2: an input that is large gets a scale, by
which its weights are multiplied before they are rounded and the input is divided. The
scale of input c is its root mean square to the power a, and a is searched on a grid.
Then each group's largest code is searched (`clipped`), as AWQ's programs do. Errors are
those of the outputs of linear layers, exactly, from the sum of x^T x over their inputs.
"""

from collections.abc import Sequence

import numpy as np

from zinf.hf.quantized.rounding import Grid, Rounded, nearest

# Powers a from 0 to 1, and how far the largest weight of a group may be cut off.
POWERS = np.linspace(0, 1, 21)
SHRINKS = 1 - np.arange(10) / 20
# Scales are at least so large before they are centered.
LEAST = 1e-4


def best_scales(
    weights: Sequence[np.ndarray], gram: np.ndarray, grid: Grid
) -> np.ndarray:
    """The scale of each input of some layers that changes their outputs least.

    Args:
        weights: of layers with the same inputs, each float32 [outputs, inputs].
        gram: the sum of x^T x over inputs x, float32 [inputs, inputs], up to a factor.

    Returns:
        float32 [inputs]; the square root of the largest times the smallest is 1.

    Raises:
        ValueError: `gram` is not finite or all 0.
    """
    sizes = np.sqrt(np.diagonal(gram).astype(np.float64))
    mean = float(sizes.mean())
    if not np.isfinite(gram).all() or mean <= 0:
        raise ValueError(
            f"the inputs have a mean size of {mean:.6g}, and all numbers of the sum "
            "over them must be finite, and some not 0"
        )
    errors, candidates = [], [_centered((sizes / mean) ** power) for power in POWERS]
    for scales in candidates:
        gaps = (nearest(w * scales, grid).plain / scales - w for w in weights)
        errors.append(sum(float(np.vdot(gap @ gram, gap)) for gap in gaps))
    return candidates[int(np.argmin(errors))]


def clipped(weight: np.ndarray, gram: np.ndarray, grid: Grid) -> Rounded:
    """A weight rounded to the nearest, with the best largest code of each group.

    Args:
        weight, gram: see `best_scales`; the group divides the inputs.

    Raises:
        ValueError: `gram` is not finite.
    """
    if not np.isfinite(gram).all():
        raise ValueError("all numbers of the sum over its inputs must be finite")
    rows = weight.T.reshape(-1, grid.group, weight.shape[0])
    codes, scales = np.empty_like(rows), np.empty_like(rows[:, 0])
    for number, group in enumerate(rows):
        inputs = slice(number * grid.group, (number + 1) * grid.group)
        own, least = gram[inputs, inputs], np.inf
        for shrink in SHRINKS:
            step = grid.scales(group, shrink)
            found = grid.codes(group, step)
            gap = found * step - group
            error = (own @ gap * gap).sum(axis=0)
            is_better = error < least
            least = np.where(is_better, error, least)
            scales[number] = np.where(is_better, step, scales[number])
            codes[number] = np.where(is_better, found, codes[number])
    return Rounded.of_rows(codes.reshape(-1, weight.shape[0]), scales)


def _centered(sizes: np.ndarray) -> np.ndarray:
    scales = np.maximum(sizes, LEAST)
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
