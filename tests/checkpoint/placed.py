"""Persistent arrays of uneven shapes, on any devices, ZeRO stage and tiers."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

import zinf
from tests.unit.checkpoint.cases import specs_of
from zinf.core.memory import open_stores
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Tier
from zinf.core.sharding import axis_rule, persistent_layouts

STACKED = "blocks/kernel"
# Matrices that no number of devices divides, one whose rows are its longer dim and one
# whose columns are, one stacked over layers, a vector, a scalar, nothing; in the roles
# that are cut from different stages on.
SHAPES: dict[str, tuple[int, ...]] = {
    "up": (3, 5),
    "out": (23, 29),
    "wide": (2, 37),
    STACKED: (3, 7, 5),
    "bias": (23,),
    "scale": (),
    "empty": (0, 4),
}
KINDS = {"param": ml_dtypes.bfloat16, "master": np.float32, "state0": np.float32}
SPREAD = (Tier.NVME, Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class Placement:
    """Attributes:
    tiers: that arrays are dealt to in turn; with several, a stacked one by layers.
    """

    num_devices: int
    stage: int
    tiers: tuple[Tier, ...]

    def __str__(self) -> str:
        return f"{self.num_devices} devices, stage {self.stage}, {'+'.join(self.tiers)}"


def contents() -> dict[ArrayId, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        ArrayId.persistent(kind, path): np.asarray(
            random.standard_normal(shape)
        ).astype(dtype)
        for kind, dtype in KINDS.items()
        for path, shape in SHAPES.items()
    }


@contextmanager
def placed(
    placement: Placement, arrays: Mapping[ArrayId, np.ndarray]
) -> Iterator[Residents]:
    """The arrays at rest as `placement` says."""
    mesh = zinf.make_mesh(jax.devices()[: placement.num_devices])
    specs = specs_of(arrays)
    rule = axis_rule(mesh, stage=placement.stage, min_bytes=1)
    layouts = persistent_layouts(specs, rule)
    pieces: list[ArrayId] = []
    for array in arrays:
        by_layer = array.path == STACKED and layouts.of(array).has_whole_rows
        rows = range(specs[array].shape[0]) if by_layer else ()
        pieces += [array.piece((i, i + 1)) for i in rows] or [array]
    tiers = placement.tiers
    homes = {piece: tiers[i % len(tiers)] for i, piece in enumerate(pieces)}
    with tempfile.TemporaryDirectory() as folder:
        devices = list(mesh.devices.flat)
        stores = open_stores(devices, nvme_paths=[Path(folder)])
        residents = Residents(stores, layouts, homes)
        by_row = {a: 1 for a in arrays if a.path == STACKED}
        residents.create(by_row)
        for piece in pieces:
            whole = arrays[piece.whole]
            content = whole if piece.rows is None else whole[slice(*piece.rows)]
            residents.write(piece, content.copy())
        yield residents
        stores.close()
