"""Writes parameters as safetensors files, in parts of bounded size."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zinf.checkpoint.saved import Saved
from zinf.core.engine.engine import Engine
from zinf.core.engine.named import MASTER
from zinf.core.interchange.folder import complete_folder
from zinf.core.interchange.header import ordered, write_header
from zinf.core.interchange.names import Names, named
from zinf.core.interchange.outgoing import as_dtype, held_bytes
from zinf.core.interchange.rounding import rounded
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import AbstractTensors, boxes, stream
from zinf.core.memory.nvme import Drive, File
from zinf.core.memory.nvme.system import sync
from zinf.core.memory.storage_error import INTERCHANGE
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

INDEX = "model.safetensors.index.json"
# Largest file that Hugging Face's libraries write by default.
MAX_SHARD_BYTES = 5 * 10**9
# Hugging Face's libraries read which framework's names and layouts a file has.
METADATA = {"format": "flax"}


@dataclass(frozen=True)
class Shard:
    """One file of an export.

    Attributes:
        specs: specs of its tensors by name, in the order of the file.
    """

    file: str
    specs: Mapping[str, ArraySpec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def export_safetensors(
    source: Engine | Saved | AbstractTensors,
    directory: Path | str,
    *,
    kind: str = MASTER,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    names: Names = None,
    metadata: Mapping[str, str] = METADATA,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write parameters as safetensors files: an engine's, a checkpoint's, or others.

    If a leaf has a master copy, the master copy is written, not the compute copy.
    Frozen leaves are written in the dtype that they are kept in. A tied leaf is written
    once. Model state is written below "model_state". Typed random keys are written as
    their uint32 words. The files are `model.safetensors`, or several files and an
    index, named as Hugging Face's libraries name them. `directory` appears only when
    all files are complete.

    While one part of 16 MiB (or one row, if a row is larger) is written, the next is
    read; both count against the host budget. If an engine has several devices, a leaf
    that is sharded along its leading dim is one part.

    Args:
        directory: absent or empty.
        kind: "master" writes the weights as trained; "ema" their average, where a leaf
            has one (`zinf.with_ema`). Has no effect on tensors that are given.
        dtype: dtype of all floating-point tensors; values are rounded to the nearest,
            ties to even. By default each leaf has the dtype that it is kept in.
        max_shard_bytes: largest sum of tensor bytes in a file. A tensor that is larger
            gets a file of its own.
        names: names of tensors, by key path. By default, the tensor of
            "blocks/0/kernel" is "blocks.0.kernel".
        metadata: texts that each file has beside its tensors.
        beside: called with the folder before it gets its name, to add other files.

    Raises:
        ValueError: there is no average of that `kind`, two leaves have one name,
            safetensors has no such dtype, or a finite value is beyond the range of
            `dtype`.
        FileExistsError: the folder is not empty.
        StorageError: a file cannot be written, or the drive has too little free space.
            The space is checked before the first byte is written.
        BudgetExceeded: the host has no room for two parts.
    """
    tensors = parameters(source, kind)
    name_of = named(tensors.specs, names)
    path_of = {name: path for path, name in name_of.items()}
    specs = {
        name: as_dtype(tensors.specs[path], dtype) for path, name in name_of.items()
    }
    shards = plan_shards(specs, max_shard_bytes)
    directory = Path(directory)
    needed_bytes = sum(shard.nbytes for shard in shards)
    with (
        tensors.holding(held_bytes(tensors, dtype)),
        complete_folder(directory, needed_bytes) as fresh,
        Drive(fresh) as drive,
    ):
        for shard in shards:
            _write(fresh / shard.file, shard, tensors, path_of, drive, metadata)
        if len(shards) > 1:
            _write_index(fresh / INDEX, shards)
        if beside is not None:
            beside(fresh)


def plan_shards(specs: Mapping[str, ArraySpec], max_bytes: int) -> list[Shard]:
    """Distributes tensors over files in order; each file gets as many as fit."""
    if max_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_bytes}, and has to be positive.")
    groups: list[dict[str, ArraySpec]] = [{}]
    room_bytes = max_bytes
    for name, spec in specs.items():
        if spec.nbytes > room_bytes and groups[-1]:
            groups.append({})
            room_bytes = max_bytes
        groups[-1][name] = spec
        room_bytes -= spec.nbytes
    files = shard_files(len(groups))
    return [
        Shard(file, {name: group[name] for name in ordered(group)})
        for file, group in zip(files, groups, strict=True)
    ]


def shard_files(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _write(
    path: Path,
    shard: Shard,
    tensors: AbstractTensors,
    path_of: Mapping[str, str],
    drive: Drive,
    metadata: Mapping[str, str],
) -> None:
    what = f"Cannot write {path.name}"
    header = np.frombuffer(write_header(shard.specs, shard.specs, metadata), np.uint8)
    leaves = {path_of[name]: spec for name, spec in shard.specs.items()}
    wanted = (
        (leaf, box)
        for leaf in leaves
        for box in boxes(tensors.specs[leaf].shape, tensors.block(leaf))
    )
    with INTERCHANGE.explained(what, path):
        # Created here with the usual permissions: `File` would make it private to the
        # user, as files of the NVMe tier are.
        path.touch(exist_ok=False)
        file = File(drive, path, nbytes=len(header) + shard.nbytes)
        file.write(header)
    offset = len(header)

    def write(leaf: str, _: Box, content: np.ndarray) -> None:
        nonlocal offset
        content = rounded(content, leaves[leaf].dtype, name=leaf)
        with INTERCHANGE.explained(what, path):
            file.write(content, offset)
        offset += content.nbytes

    stream(tensors, wanted, write)
    with INTERCHANGE.explained(what, path):
        file.flush(durable=True)


def _write_index(path: Path, shards: Sequence[Shard]) -> None:
    content = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.specs},
    }
    with (
        INTERCHANGE.explained("Cannot export", path),
        open(path, "x", encoding="utf-8") as file,
    ):
        json.dump(content, file, indent=2)
        file.flush()
        sync(file.fileno())
