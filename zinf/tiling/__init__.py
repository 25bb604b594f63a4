"""Layers in tiles, for users who choose by hand what is cut and where."""

from zinf.tiling.embedding import embed as embed
from zinf.tiling.linear import LinearTiles as LinearTiles
from zinf.tiling.linear import linear as linear
from zinf.tiling.linear import linear_parts as linear_parts
from zinf.tiling.loss import cross_entropy as cross_entropy
from zinf.tiling.loss import cross_entropy_over as cross_entropy_over
from zinf.tiling.mlp import HiddenTile as HiddenTile
from zinf.tiling.mlp import MlpTiles as MlpTiles
from zinf.tiling.mlp import mlp as mlp
from zinf.tiling.rows import over_rows as over_rows
from zinf.tiling.splits import join as join
from zinf.tiling.splits import split as split
