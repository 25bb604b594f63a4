"""The parts of a checkpoint that each process wrote, and how they become one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from zinf.checkpoint.grid import Grid, Index
from zinf.checkpoint.manifest import StoredArray
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
