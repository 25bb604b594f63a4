"""The parts of a checkpoint that each process wrote, and how they become one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zinf.checkpoint.grid import Grid, Index
from zinf.checkpoint.manifest import Manifest, StoredArray
from zinf.core.memory.nvme.system import sync, sync_folder
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.program import ArrayId
from zinf.core.text.json_text import from_json


@dataclass
class Part:
    """The files of a checkpoint that one process wrote.

    Attributes:
        grids: the grids of all arrays, the same on every process.
        metadata: checksums of `zarr.json` of all arrays, on the first process, which
            writes these files; empty on the others.
        checksums: checksums of the chunk files that this process wrote.
    """

    grids: dict[ArrayId, Grid] = field(default_factory=dict)
    metadata: dict[ArrayId, int] = field(default_factory=dict)
    checksums: dict[ArrayId, dict[Index, int]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The grids and checksums, as `merged` takes them."""
        content = [
            [
                grid.chunk,
                [[grid.number(i), x] for i, x in self.checksums[array].items()],
            ]
            for array, grid in self.grids.items()
        ]
        return json.dumps(content).encode()

    def write(self, directory: Path, process: int) -> None:
        """Write the grids and checksums to a file, which `commit` reads."""
        path = directory / part_name(process)
        try:
            with open(path, "wb") as file:
                file.write(self.encoded())
                file.flush()
                sync(file.fileno())
        except OSError as error:
            raise CHECKPOINT.failure("Cannot save a checkpoint", path, error) from error


def commit(
    directory: Path,
    part: Part,
    scalars: Mapping[str, Any],
    data: Any,
    *,
    num_processes: int,
) -> None:
    """Merge the parts of all processes and write the manifest.

    Only the first process calls this, after all processes have written their parts.

    Args:
        part: the part of the first process.

    Raises:
        StorageError: the manifest cannot be written.
        RuntimeError: the parts differ in their grids, or a chunk is in none of them.
    """
    others = [directory / part_name(process) for process in range(1, num_processes)]
    arrays = merged(part, {path.name: path.read_bytes() for path in others})
    Manifest(arrays, dict(scalars), data).write(directory)
    for path in others:
        path.unlink()
    sync_folder(directory)


def merged(part: Part, others: Mapping[str, bytes]) -> dict[ArrayId, StoredArray]:
    """The arrays of a checkpoint, from the parts of all processes.

    Args:
        part: the part of the first process.
        others: the encoded parts of the other processes, by the names of their files.

    Raises:
        RuntimeError: the parts differ in their grids, or a chunk is in none of them.
    """
    checksums = {array: dict(part.checksums[array]) for array in part.grids}
    for name, encoded in others.items():
        content = from_json(encoded)
        for (array, grid), (chunk, found) in zip(
            part.grids.items(), content, strict=True
        ):
            if tuple(chunk) != grid.chunk:
                raise RuntimeError(
                    f"{name} has chunks of {chunk} of {array}, where the first "
                    f"process has {list(grid.chunk)}: their plans differ."
                )
            checksums[array].update((grid.index(n), x) for n, x in found)
    arrays = {}
    for array, grid in part.grids.items():
        missing = grid.num_chunks - len(checksums[array])
        if missing:
            raise RuntimeError(f"No process wrote {missing} chunks of {array}.")
        in_order = tuple(checksums[array][index] for index in grid.indices())
        arrays[array] = StoredArray(grid, part.metadata[array], in_order)
    return arrays


def part_name(process: int) -> str:
    return f"part-{process}.json"
