"""Cuts the weights of a layer over devices (tensor parallelism)."""

from zinf.core.sharding.axes.tensor.cuts import channel_leaves as channel_leaves
from zinf.core.sharding.axes.tensor.cuts import find_cuts as find_cuts
from zinf.core.sharding.axes.tensor.expert import cut_expert as cut_expert
from zinf.core.sharding.axes.tensor.rewrite import along_tensor as along_tensor
from zinf.core.sharding.axes.tensor.rewrite import (
    forward_along_tensor as forward_along_tensor,
)
