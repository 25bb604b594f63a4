"""Parameters written as safetensors files, in memory that does not depend on them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zinf.checkpoint.saved import Saved
from zinf.engine import Engine
from zinf.interchange.failure import explained
from zinf.interchange.folder import complete_folder
from zinf.interchange.header import ordered, write_header
from zinf.interchange.names import Names, named
from zinf.interchange.outgoing import as_dtype, held_bytes
from zinf.interchange.rounding import rounded
from zinf.interchange.sources import parameters
from zinf.interchange.tensors import AbstractTensors, boxes, stream
from zinf.memory.nvme import Drive, File
from zinf.memory.nvme.system import sync
from zinf.program import ArraySpec
from zinf.sharding import Box

INDEX = "model.safetensors.index.json"
# What Hugging Face's libraries write at most into one file.
MAX_SHARD_BYTES = 5 * 10**9
# They look at what wrote a file, for names and layouts differ between frameworks.
METADATA = {"format": "flax"}


@dataclass(frozen=True)
class Shard:
    """One file of an export.

    Attributes:
        specs: of its tensors, in the order of the file.
    """

    file: str
    specs: Mapping[str, ArraySpec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def export_safetensors(
    source: Engine | Saved,
    directory: Path | str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    names: Names = None,
) -> None:
    """Write the parameters of an engine or a checkpoint as safetensors files.

    The values are those that are trained: where there is a master copy it is written,
    not the copy that the loss is computed with. Frozen leaves are written as they are
    kept, a tied leaf once, and model state below "model_state". The folder is there
    when it is complete: `model.safetensors`, or several files and an index, as Hugging
    Face's libraries name them. Typed random keys are written as their words.

    A part of 16 MiB (or one row, if that is larger) is read while another is written,
    counted in the ledger of the host; of an engine on several devices, a whole leaf if
    it is cut along its leading dim.

    Args:
        directory: absent or empty.
        dtype: of all floating-point numbers, rounded to the nearest, ties to even; by
            default each leaf has the dtype it is kept in.
        max_shard_bytes: of the tensors in a file; a larger tensor has one of its own.
        names: of tensors, by key path; "blocks.0.kernel" for "blocks/0/kernel" without.

    Raises:
        ValueError: two leaves have one name, a dtype does not exist in the format, or a
            finite value is beyond the range of `dtype`.
        FileExistsError: the folder holds something already.
        StorageError: it cannot be written, or there is too little space, which is found
            before anything is written.
        BudgetExceeded: the host has no room for two parts.
    """
    tensors = parameters(source)
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
            _write(fresh / shard.file, shard, tensors, path_of, drive)
        if len(shards) > 1:
            _write_index(fresh / INDEX, shards)


def plan_shards(specs: Mapping[str, ArraySpec], max_bytes: int) -> list[Shard]:
    """Tensors dealt to files in order, as many as fit in each."""
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
) -> None:
    what = f"Cannot write {path.name}"
    header = np.frombuffer(write_header(shard.specs, shard.specs, METADATA), np.uint8)
    leaves = {path_of[name]: spec for name, spec in shard.specs.items()}
    wanted = (
        (leaf, box)
        for leaf in leaves
        for box in boxes(tensors.specs[leaf].shape, tensors.block(leaf))
    )
    with explained(what, path):
        # As anybody's files are: those of the NVMe tier are this user's alone.
        path.touch(exist_ok=False)
        file = File(drive, path, nbytes=len(header) + shard.nbytes)
        file.write(header)
    offset = len(header)

    def write(leaf: str, _: Box, content: np.ndarray) -> None:
        nonlocal offset
        content = rounded(content, leaves[leaf].dtype, name=leaf)
        with explained(what, path):
            file.write(content, offset)
        offset += content.nbytes

    stream(tensors, wanted, write)
    with explained(what, path):
        file.flush(durable=True)


def _write_index(path: Path, shards: Sequence[Shard]) -> None:
    content = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.file for shard in shards for name in shard.specs},
    }
    with explained("Cannot export", path), open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        sync(file.fileno())
