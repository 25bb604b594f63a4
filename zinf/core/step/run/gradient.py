"""Reads gradients that wait for a deferred update in the next step."""

from collections.abc import Sequence

import numpy as np

from zinf.core.memory import Stores, gathered, to_shares
from zinf.core.plan import Copy
from zinf.core.sharding import Layouts


def read_gradient(
    stores: Stores,
    layouts: Layouts,
    at_rest: Sequence[Copy],
    path: str,
) -> np.ndarray | None:
    """The whole gradient of a leaf, or None if a part of it no longer waits.

    Args:
        at_rest: the gradients that wait for a deferred update, and their tiers.
    """
    mine = [(array, tier) for array, tier in at_rest if array.path == path]
    if not mine:
        return None
    mine.sort(key=lambda copy: copy[0].rows or (0, 0))
    shape = layouts.gradients[path].shape
    rows = [array.rows for array, _ in mine]
    if None not in rows and sum(b - a for a, b in filter(None, rows)) != shape[0]:
        return None
    parts = []
    for array, tier in mine:
        layout, content = layouts.of(array), stores[tier].read(array).result()
        if not isinstance(content, np.ndarray):
            (content,) = to_shares([content], [layout])
        parts.append(gathered(content, layout))
    return np.array(parts[0]) if len(parts) == 1 else np.concatenate(parts)
