"""The terms that all packages share: tiers, array names, and programs as plain data.

Nothing here imports jax or numpy, so that `plan` can be built and tested without them.
"""

from zinf.core.program.array import (
    FLOAT32_BYTES,
    ArrayId,
    ArraySpec,
    Role,
    Rows,
    covers,
    overlaps,
)
from zinf.core.program.program import (
    KEY,
    Leaf,
    Program,
    RowSum,
    SegmentSpec,
    Tiling,
)
from zinf.core.program.tier import (
    HOPS,
    MOVING,
    ROUTES,
    TIERS,
    TRANSFER_LINKS,
    Hop,
    Link,
    Tier,
    TierRow,
    open_tiers,
)

__all__ = [
    "FLOAT32_BYTES",
    "HOPS",
    "KEY",
    "MOVING",
    "ROUTES",
    "TIERS",
    "TRANSFER_LINKS",
    "ArrayId",
    "ArraySpec",
    "Hop",
    "Leaf",
    "Link",
    "Program",
    "Role",
    "RowSum",
    "Rows",
    "SegmentSpec",
    "Tier",
    "TierRow",
    "Tiling",
    "covers",
    "open_tiers",
    "overlaps",
]
