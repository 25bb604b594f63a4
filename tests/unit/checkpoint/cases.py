"""Arrays of the kinds that differ, placed on tiers, and the least of an engine."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zinf.checkpoint import read_arrays
from zinf.core.memory.residents import Residents
from zinf.core.plan import Plan
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import Layouts, layouts_on_one

EMBED = ArrayId(Role.PARAM, "embed")
STACKED = ArrayId(Role.PARAM, "blocks/kernel")
# A matrix, one that rests in pieces (a layer each), a
# scalar, a narrow dtype, and names that a file system would take otherwise.
ARRAYS = {
    EMBED: np.arange(48, dtype=np.float32).reshape(12, 4),
    STACKED: np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2) + 1,
    ArrayId(Role.STATE, "embed", slot=0): np.zeros((12, 4), np.float32),
    ArrayId(Role.STATE, "scale", slot=1): np.array(7, np.float32),
    ArrayId(Role.PARAM, "a/../c.0"): np.arange(5, dtype=np.int32),
    ArrayId(Role.MASTER, ""): np.zeros((0, 3), np.float32),
    ArrayId(Role.MASTER, "embed"): np.arange(48)
    .reshape(12, 4)
    .astype(ml_dtypes.bfloat16),
}


def specs_of(arrays: Mapping[ArrayId, np.ndarray]) -> dict[ArrayId, ArraySpec]:
    return {
        array: ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)
        for array, value in arrays.items()
    }


def layouts_of(arrays: Mapping[ArrayId, np.ndarray]) -> Layouts:
    """The table of the arrays, whole on one device."""
    return layouts_on_one(jax.devices()[0], specs_of(arrays))


def homes_on(
    tiers: list[Tier], arrays: Mapping[ArrayId, np.ndarray]
) -> dict[ArrayId, Tier]:
    """Deals the arrays, and the layers of the stacked one, to the tiers in turn."""
    pieces: list[ArrayId] = []
    for array, value in arrays.items():
        if array == STACKED:
            rows = range(value.shape[0])
            pieces += [array.piece((i, i + 1)) for i in rows]
        else:
            pieces.append(array)
    return {piece: tiers[i % len(tiers)] for i, piece in enumerate(pieces)}


@dataclass
class SavedEngine:
    """What `Checkpoints` asks of an engine."""

    residents: Residents
    state: dict[str, Any]
    plan: Plan = Plan((), {}, {}, dict.fromkeys(Tier, 0), {})
    pending_save: Future[None] | None = None

    def scalars(self) -> dict[str, Any]:
        return dict(self.state)

    def restore(self, directory: Path, *, verify: bool = True) -> None:
        self.state = read_arrays(directory, self.residents, verify=verify)


def advance(engine: SavedEngine, step: int) -> None:
    """What a step does, as far as a checkpoint is concerned."""
    if engine.pending_save is not None:
        engine.pending_save.result()
    engine.residents.write(EMBED, ARRAYS[EMBED] + step)
    engine.state = {"num_steps": step}


def flipped(content: bytes, position: int) -> bytes:
    """`content` with one bit changed."""
    changed = bytearray(content)
    changed[position] ^= 4
    return bytes(changed)
