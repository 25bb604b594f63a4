"""Reads the parameters of an engine or the arrays of a checkpoint as named tensors.

With a `kind` such as "ema", the tensors of leaves that have such an average
(`zinf.with_ema`) are the averages. Others are the parameters as they are.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from math import prod

import jax
import numpy as np

from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.stripes import counted
from zinf.core.engine.engine import Engine
from zinf.core.engine.named import MASTER, averages_of
from zinf.core.interchange.tensors import AbstractTensors, block_bytes, block_of_chunks
from zinf.core.memory.chunk import chunk_shape
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.sharding import Box

# Parts consist of whole chunks up to this size. Larger parts are cut across chunks, and
# each chunk is then read more than once.
MAX_BLOCK_BYTES = 128 * 2**20


class EngineTensors(AbstractTensors):
    """The parameters and model state of an engine by key path.

    They have the dtype that they are kept in. Parts are blocks of rows. An array whose
    leading dim is sharded over several devices is one part.
    """

    def __init__(self, engine: Engine, kind: str = MASTER) -> None:
        if not engine.is_placed:
            raise ValueError(
                "The parameters have no place before the first batch is known. Pass "
                "batch= to zinf.initialize, or take a step first."
            )
        if jax.process_count() > 1:
            raise NotImplementedError(
                "An engine on several processes does not export or import parameters. "
                "Use a checkpoint, in one process: `zinf checkpoint export` and "
                "`import`. It is saved and restored on any number of processes."
            )
        self._residents = engine.residents
        self._arrays = kept(self._residents.specs)
        if kind != MASTER:
            averages = averages_of(engine.planner, kind)
            self._arrays |= {path: x.array(path) for path, x in averages.items()}
        specs = self._residents.specs
        self.specs = {path: specs[array] for path, array in self._arrays.items()}

    def block(self, name: str) -> tuple[int, ...]:
        spec = self.specs[name]
        if not self._residents.layouts.of(self._arrays[name]).has_whole_rows:
            return tuple(max(1, size) for size in spec.shape)
        return (chunk_shape(spec)[0], *(max(1, size) for size in spec.shape[1:]))

    def read(self, name: str, box: Box) -> np.ndarray:
        array, shape = self._arrays[name], self.specs[name].shape
        if box != whole_box(shape):
            array = array.piece(box[0])
        return np.ascontiguousarray(self._residents.read(array)).reshape(
            [high - low for low, high in box]
        )

    @contextmanager
    def holding(self, nbytes: int) -> Generator[None, None, None]:
        homes = self._residents.homes
        on_device = (
            block_bytes(self, name)
            for name, array in self._arrays.items()
            if homes.get(array) == Tier.DEVICE
        )
        # The device copies rows of an array before they go to the host.
        held = {Tier.HOST: nbytes, Tier.DEVICE: max(on_device, default=0)}
        with counted(held, self._residents, "exporting parameters"):
            yield


class SavedTensors(AbstractTensors):
    """Arrays of a checkpoint. Every chunk that is read is compared with its checksum.

    Args:
        arrays: the array of each name.
    """

    def __init__(self, saved: Saved, arrays: Mapping[str, ArrayId]) -> None:
        self._saved, self._arrays = saved, dict(arrays)
        self.specs = {name: saved.arrays[array] for name, array in arrays.items()}

    def block(self, name: str) -> tuple[int, ...]:
        spec = self.specs[name]
        chunk = self._saved.grid(self._arrays[name]).chunk
        block = block_of_chunks(spec, chunk)
        nbytes = prod(map(min, block, spec.shape)) * spec.itemsize
        return block if nbytes <= MAX_BLOCK_BYTES else chunk_shape(spec)

    def read(self, name: str, box: Box) -> np.ndarray:
        return self._saved.begin_read(self._arrays[name], box).result()


def parameters(
    source: Engine | Saved | AbstractTensors, kind: str = MASTER
) -> AbstractTensors:
    """The parameters and model state of an engine or a checkpoint, by key path.

    Args:
        kind: "master" for the weights as trained; "ema" for their average, where there
            is one (`zinf.with_ema`). Other tensors are what they are.

    Raises:
        ValueError: there is no average of that kind.
    """
    if isinstance(source, AbstractTensors):
        return source
    if isinstance(source, Saved):
        arrays = kept(source.arrays)
        if kind != MASTER:
            arrays |= saved_averages(source, kind)
        return SavedTensors(source, arrays)
    return EngineTensors(source, kind)


def saved_averages(saved: Saved, kind: str) -> dict[str, ArrayId]:
    """The averages of a kind in a checkpoint, by the path of their leaf.

    Raises:
        ValueError: the checkpoint has none of that kind, or names arrays that it does
            not have.
    """
    known = saved.scalars.get("averages", {})
    found = known.get(kind) if isinstance(known, dict) else None
    if not isinstance(found, dict):
        has = ", ".join(map(repr, known)) or "none"
        raise ValueError(
            f"{saved.directory} has no average of the weights that is called {kind!r}; "
            f"it has {has}. Runs with optimizer.ema in the config, or zinf.with_ema in "
            "Python, keep one."
        )
    leaves = kept(saved.arrays)
    averages = {}
    for path, slot in found.items():
        array = ArrayId(Role.STATE, path, slot=slot)
        spec, leaf = saved.arrays.get(array), leaves.get(path)
        if spec is None or leaf is None or spec.shape != saved.arrays[leaf].shape:
            raise ValueError(
                f"{saved.directory} says that {array} is an average of {path!r}, and "
                "has no such array. It is damaged; use another checkpoint."
            )
        averages[path] = array
    return averages


def kept(arrays: Iterable[ArrayId]) -> dict[str, ArrayId]:
    """The array to export for each leaf, by key path: its master, or else its param."""
    masters = {array.path: array for array in arrays if array.role == Role.MASTER}
    return {
        array.path: masters.get(array.path, array)
        for array in arrays
        if array.role == Role.PARAM
    }
