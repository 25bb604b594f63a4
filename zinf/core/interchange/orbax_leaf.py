"""Orbax leaves that are written and opened without being in memory as a whole.

Orbax writes the metadata of the tree, merges its files and renames the folder at the
end. It calls a `TypeHandler` to move the bytes of a leaf: zinf passes its own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from zinf.core.interchange.rounding import rounded
from zinf.core.interchange.tensors import AbstractTensors, boxes, stream
from zinf.core.memory.nvme.system import sync_file, sync_folder
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

# Orbax's names for kinds of leaves that are arrays, in the metadata of a tree.
ARRAY_KINDS = ("np.ndarray", "jax.Array", "scalar")
# No sync per part: that took most of the time. `_write_all` syncs all files at its end.
CONTEXT: dict[str, Any] = {
    "file_io_sync": False,
    "cache_pool": {"total_bytes_limit": 0},
    # Orbax's name for the cache of its OCDBT index.
    "cache_pool#ocdbt": {"total_bytes_limit": 2**24},
}


@dataclass(frozen=True)
class StreamedLeaf:
    """A leaf to write in the dtype of `spec`."""

    tensors: AbstractTensors
    name: str
    spec: ArraySpec

    def write(self, target: ts.TensorStore) -> None:
        """Writes the leaf in the parts that `tensors` is best read in, in order."""
        shape = self.spec.shape
        wanted = (
            (self.name, box) for box in boxes(shape, self.tensors.block(self.name))
        )

        def write(name: str, box: Box, content: np.ndarray) -> None:
            content = rounded(content, self.spec.dtype, name=name)
            part = target[tuple(slice(*edges) for edges in box)]
            part.write(content, can_reference_source_data_indefinitely=True).result()

        stream(self.tensors, wanted, write)


class OpenedLeaf:
    """A leaf of a checkpoint as an open TensorStore; no content was read yet."""

    def __init__(self, array: ts.TensorStore) -> None:
        self.array = array


class LeafHandler(ocp.type_handlers.TypeHandler):
    """Writes `StreamedLeaf`s, and restores any array as an `OpenedLeaf`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._plain = ocp.type_handlers.NumpyHandler()

    def typestr(self) -> str:
        return self._kind

    async def metadata(self, infos: Sequence[ocp.type_handlers.ParamInfo]) -> Any:
        return await self._plain.metadata(infos)

    async def serialize(
        self,
        values: Sequence[StreamedLeaf],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> list[Any]:
        writing = self._write_all(values, infos)
        name = "zinf-interchange"
        return [ocp.future.CommitFutureAwaitingContractedSignals(writing, name=name)]

    async def deserialize(
        self,
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.RestoreArgs] | None = None,
    ) -> list[OpenedLeaf]:
        return [OpenedLeaf(await _opened(info)) for info in infos]

    async def _write_all(
        self,
        values: Sequence[StreamedLeaf],
        infos: Sequence[ocp.type_handlers.ParamInfo],
    ) -> None:
        # Blocking is fine: Orbax runs this coroutine in a thread and loop of its own.
        context = ts.Context(CONTEXT)
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            shape = value.spec.shape
            block = tuple(map(min, value.tensors.block(value.name), shape))
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=bool(info.is_ocdbt_checkpoint),
                global_shape=shape,
                # Orbax makes chunks of this shape.
                local_shape=block,
                dtype=numpy_dtype(value.spec.dtype),
                process_index=0,
            )
            opening = ts.open(spec, create=True, open=True, context=context)
            value.write(opening.result())
        for folder in {info.parent_dir for info in infos}:
            _sync_all(Path(folder))


def leaf_handlers(leaf_type: type) -> Any:
    """A registry in which the handler of every kind of array is a `LeafHandler`."""
    first, *rest = (LeafHandler(kind) for kind in ARRAY_KINDS)
    made = ocp.type_handlers.create_type_handler_registry((leaf_type, first))
    for handler in rest:
        made.add(type(handler.typestr(), (), {}), handler)
    return made


async def _opened(info: ocp.type_handlers.ParamInfo) -> ts.TensorStore:
    spec = ocp.type_handlers.get_json_tspec_read(
        info, use_ocdbt=bool(info.is_ocdbt_checkpoint)
    )
    return await ts.open(ts.Spec(spec), open=True, context=info.ts_context)


def _sync_all(folder: Path) -> None:
    """Syncs all files and folders in a folder, so that they survive a power cut."""
    for root, _, files in os.walk(folder):
        for file in files:
            sync_file(Path(root, file))
        sync_folder(Path(root))
