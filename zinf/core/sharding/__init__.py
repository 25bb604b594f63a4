"""Shards arrays over a mesh of devices, and over processes for host and nvme."""

from zinf.core.sharding.encoding import Blocks, Nibbles
from zinf.core.sharding.layout import Box, Layout, intersection, relative
from zinf.core.sharding.layouts import (
    ArrayEntry,
    Layouts,
    batch_dims,
    batch_layouts,
    layouts_on_one,
    persistent_layouts,
    placed_layout,
    whole_layout,
)
from zinf.core.sharding.mesh import Dim
from zinf.core.sharding.parts import AbstractParts, Parts
from zinf.core.sharding.rule import (
    AxisRule,
    axis_rule,
    batch_share,
    num_data_parallel,
    rows_of_process,
)
from zinf.core.sharding.signs import AbstractCompression, Phase
from zinf.core.sharding.wire import as_cut, cut, gather, spread, spread_bytes

__all__ = [
    "AbstractCompression",
    "AbstractParts",
    "ArrayEntry",
    "AxisRule",
    "Blocks",
    "Box",
    "Dim",
    "Layout",
    "Layouts",
    "Nibbles",
    "Parts",
    "Phase",
    "as_cut",
    "axis_rule",
    "batch_dims",
    "batch_layouts",
    "batch_share",
    "cut",
    "gather",
    "intersection",
    "layouts_on_one",
    "num_data_parallel",
    "persistent_layouts",
    "placed_layout",
    "relative",
    "rows_of_process",
    "spread",
    "spread_bytes",
    "whole_layout",
]
