"""Shards arrays over a mesh of devices, and over processes for host and nvme."""

from zinf.sharding.collective import as_cut, cut, gather
from zinf.sharding.layout import Box, Layout, intersection, relative
from zinf.sharding.layouts import (
    Layouts,
    batch_layout,
    layouts_on_one,
    persistent_layouts,
    placed_layout,
    whole_layout,
)
from zinf.sharding.zero import ZeroRule, zero_rule

__all__ = [
    "Box",
    "Layout",
    "Layouts",
    "ZeroRule",
    "as_cut",
    "batch_layout",
    "cut",
    "gather",
    "intersection",
    "layouts_on_one",
    "persistent_layouts",
    "placed_layout",
    "relative",
    "whole_layout",
    "zero_rule",
]
