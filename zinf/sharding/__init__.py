"""Shards arrays over a mesh of devices, and over processes for host and nvme."""

from zinf.sharding.encoding import Blocks
from zinf.sharding.layout import Box, Layout, intersection, relative
from zinf.sharding.layouts import (
    Layouts,
    batch_dims,
    batch_layouts,
    layouts_on_one,
    persistent_layouts,
    placed_layout,
    whole_layout,
)
from zinf.sharding.rule import (
    AxisRule,
    Dim,
    axis_rule,
    num_batch_shares,
    num_data_parallel,
)
from zinf.sharding.wire import as_cut, cut, gather

__all__ = [
    "AxisRule",
    "Blocks",
    "Box",
    "Dim",
    "Layout",
    "Layouts",
    "as_cut",
    "axis_rule",
    "batch_dims",
    "batch_layouts",
    "cut",
    "gather",
    "intersection",
    "layouts_on_one",
    "num_batch_shares",
    "num_data_parallel",
    "persistent_layouts",
    "placed_layout",
    "relative",
    "whole_layout",
]
