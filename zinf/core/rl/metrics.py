"""Metrics that are summed, or compared, over the microbatches of a step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.problem.weighted import Weighted


def mean_over(values: jax.Array, weights: jax.Array) -> Weighted:
    """A weighted mean that microbatches do not change: its sums."""
    return Weighted(jnp.sum(values * weights), jnp.sum(weights))


def metric_values(aux: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step from `metrics["aux"]` of its loss.

    Args:
        aux: `Weighted` sums by name; under names that end in `_min` or `_max` smallest
            or largest values. All with a leading microbatch dim, or none.

    Returns:
        Means, minima and maxima; those of nothing are left out.
    """
    values = {}
    for name, value in aux.items():
        if isinstance(value, Weighted):
            weight = np.sum(np.asarray(value.weight, np.float64))
            total = np.sum(np.asarray(value.total, np.float64))
            values[name] = float(total / weight) if weight else np.nan
        else:
            pick = np.min if name.endswith("_min") else np.max
            values[name] = float(pick(np.asarray(value)))
    return {name: value for name, value in values.items() if np.isfinite(value)}
