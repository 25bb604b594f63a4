"""Imports the parameters of a plain Orbax checkpoint into an engine."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from zinf.core.engine.engine import Engine
from zinf.core.interchange.names import Names, Terms, named
from zinf.core.interchange.orbax_export import orbax_names
from zinf.core.interchange.orbax_leaf import OpenedLeaf, leaf_handlers
from zinf.core.interchange.place import place
from zinf.core.interchange.sources import EngineTensors
from zinf.core.interchange.tensors import AbstractTensors, block_of_chunks
from zinf.core.memory.storage_error import INTERCHANGE, from_tensorstore
from zinf.core.program import ArraySpec
from zinf.core.segment import named_leaves
from zinf.core.sharding import Box

METADATA = "_METADATA"


class OrbaxTensors(AbstractTensors):
    """The arrays of an Orbax checkpoint, named by their keys joined by "/".

    Opening reads no array. Parts consist of whole chunks. Orbax saves up to 2 GB of an
    array in one chunk.

    Args:
        directory: the folder that was passed to `StandardCheckpointer.save`, or
            `<step>/default` of a `CheckpointManager`.

    Raises:
        FileNotFoundError: `directory` is not the folder of an Orbax checkpoint.
        ValueError: the metadata cannot be read, or a leaf is not an array.
    """

    # TensorStore holds a chunk encoded, decoded, and in the part that it returns.
    copies = 3

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory).absolute()
        if not (self._directory / METADATA).is_file():
            raise FileNotFoundError(
                f"{directory} has no {METADATA}: it is no Orbax checkpoint of a tree. "
                "Name the folder of the item, such as 100/default of a "
                "CheckpointManager."
            )
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=leaf_handlers(OpenedLeaf)
        )
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                opened = checkpointer.restore(self._directory)
            self._arrays = {p: _array(p, x) for p, x in named_leaves(opened).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory} is no Orbax checkpoint that can be read: {error}"
            ) from error
        self.specs = {
            path: ArraySpec(
                tuple(array.shape),
                array.dtype.numpy_dtype.name,
                array.dtype.numpy_dtype.itemsize,
            )
            for path, array in self._arrays.items()
        }

    def block(self, name: str) -> tuple[int, ...]:
        chunk = self._arrays[name].chunk_layout.read_chunk.shape
        return block_of_chunks(
            self.specs[name], tuple(size or 1 for size in chunk or ())
        )

    def read(self, name: str, box: Box) -> np.ndarray:
        part = self._arrays[name][tuple(slice(*edges) for edges in box)]
        try:
            return np.asarray(part.read().result())
        except (ValueError, OSError) as error:
            what = f"Cannot read {name!r}"
            found = from_tensorstore(what, self._directory, error)
            message = str(error).partition(" [")[0].rstrip(".")
            code, file = found.errno or 0, Path(found.filename)
            raise INTERCHANGE.error(what, code, file, message) from error


def import_orbax(
    engine: Engine,
    directory: Path | str,
    *,
    names: Names = None,
    keep: Collection[str] = (),
    ignore: Collection[str] = (),
    may_round: bool = False,
) -> None:
    """Begin training from the arrays of a plain Orbax checkpoint.

    This is `import_safetensors` for Orbax, but it needs more host memory: a part is at
    least one chunk of the checkpoint, which is often a whole leaf.

    Args:
        directory: see `OrbaxTensors`.
        names: array of each leaf, by the leaf's key path: its keys in the checkpoint
            joined by "/", as in "params/dense/kernel". Other leaves have their key path
            as name, below "params" if the engine has model state.
        keep, ignore, may_round: see `import_safetensors`.

    Raises:
        FileNotFoundError, ValueError: see `OrbaxTensors` and `import_safetensors`.
        StorageError: a file cannot be read. The engine gets its initial values back.
        BudgetExceeded: the host has no room for the parts.
    """
    leaves = EngineTensors(engine).specs
    name_of = named(leaves, names, usual=orbax_names(leaves).__getitem__)
    place(engine, OrbaxTensors(directory), name_of, Terms(keep, ignore, may_round))


def _array(path: str, leaf: object) -> ts.TensorStore:
    if not isinstance(leaf, OpenedLeaf):
        raise ValueError(f"{path!r} is no array")
    return leaf.array
