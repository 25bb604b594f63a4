"""The manifest of a checkpoint: its arrays, its scalars and the state of the data."""

import errno
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.place import Place
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.process.installed import installed_version
from zinf.core.program import ArrayId, ArraySpec

FILE = "manifest.json"
FORMAT_VERSION = 2
MAX_DIFFERENCES_SHOWN = 5


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint.

    Attributes:
        grid: shape, dtype and chunks of the array.
        metadata: XXH3 checksum (64 bits) of its `zarr.json`.
        checksums: XXH3 checksum (64 bits) of every chunk file, padding included, in C
            order of the grid.
    """

    grid: Grid
    metadata: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        arrays: the arrays of the checkpoint, by ids without rows.
        scalars: step, loss scale, random key and the like, as JSON values.
        data: where the training data is read next, as a JSON value.
        written_by: the version of zinf that wrote it.
    """

    arrays: Mapping[ArrayId, StoredArray]
    scalars: dict[str, Any]
    data: Any = None
    written_by: str = field(default="", compare=False)

    @property
    def specs(self) -> dict[ArrayId, ArraySpec]:
        return {array: stored.grid.spec for array, stored in self.arrays.items()}

    def encoded(self) -> bytes:
        """The content of the file, with its own checksum."""
        content = {
            "about": "A checkpoint of zinf: one zarr v3 array per entry of arrays, in "
            "role/path. Checksums are XXH3 (64 bits) of whole files.",
            "format_version": FORMAT_VERSION,
            "zinf_version": installed_version("zinf"),
            "arrays": [_entry(*item) for item in self.arrays.items()],
            "scalars": self.scalars,
            "data": self.data,
        }
        content["checksum"] = checksum_of(content)
        return json.dumps(content, indent=1).encode()


# Hints on names of arrays, by how they begin; `engine.get` takes optax's names instead.
HINTS = {
    "state": "state0, state1, ... are the optimizer state of a parameter, in optax's "
    "order: of adam mu and nu.",
    "error": "error0, error1, ... are the error feedback of each device: those of "
    "zero_optimization.zeropp_loco_param need as many devices, in groups as large, and "
    "those of optimizers that send signs need the same optimizer.",
    "sum": "sum is a sum of gradients that wait for their update: restore them with "
    "forward_backward: true, or save after engine.optim_step().",
}


def check_same(
    saved: Mapping[ArrayId, ArraySpec], specs: Mapping[ArrayId, ArraySpec], name: Place
) -> None:
    """Raise ValueError unless the arrays of a checkpoint are exactly `specs`."""
    found = list(differences(saved, specs))
    if not found:
        return
    lines = [f"  {line}" for line in found[:MAX_DIFFERENCES_SHOWN]]
    if len(found) > len(lines):
        lines.append(f"  and {len(found) - len(lines)} more")
    for name_begins, hint in HINTS.items():
        if any(line.startswith(name_begins) for line in found):
            lines.append(hint)
    raise ValueError(
        "\n".join(
            (
                f"Checkpoint {name} is of another run than this one; of "
                f"{len(saved)} arrays there and {len(specs)} here, "
                f"{len(found)} differ:",
                *lines,
                "Use the model, optimizer and dtypes that it was saved with. Nothing "
                "was overwritten.",
            )
        )
    )


def differences(
    saved: Mapping[ArrayId, ArraySpec], here: Mapping[ArrayId, ArraySpec]
) -> Iterator[str]:
    """One line for each array whose shape or dtype differs, or that one side lacks."""
    for array in (*here, *(a for a in saved if a not in here)):
        there = saved.get(array)
        if there != here.get(array):
            yield f"{array}: {shown(there)} there, {shown(here.get(array))} here"


def checksum_of(content: Mapping[str, Any]) -> str:
    """Checksum of a manifest without its `checksum`; ignores key order and spaces."""
    text = json.dumps(content, sort_keys=True)
    return f"{xxh3_64_intdigest(text.encode()):016x}"


def not_found(directory: Place) -> FileNotFoundError:
    found = (
        f"{directory} has no {FILE}: it is not a checkpoint, or saving it was cut "
        "short. Use another one."
    )
    if isinstance(directory, Path) and not directory.exists():
        found = f"There is no checkpoint {directory}."
    return FileNotFoundError(found)


def damaged(path: Place, found: str) -> OSError:
    return CHECKPOINT.error("Cannot read the manifest", errno.EIO, path, found)


def _entry(array: ArrayId, stored: StoredArray) -> dict[str, Any]:
    assert len(stored.checksums) == stored.grid.num_chunks
    spec = stored.grid.spec
    return {
        "role": array.kind,
        "path": array.path,
        "shape": spec.shape,
        "dtype": spec.dtype,
        "chunk": stored.grid.chunk,
        "metadata": f"{stored.metadata:016x}",
        "checksums": [f"{checksum:016x}" for checksum in stored.checksums],
    }


def shown(spec: ArraySpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
