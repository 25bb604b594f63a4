"""The manifest of a checkpoint: which arrays it holds, and all that is no array."""

import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zinf.checkpoint.failure import explain, failure
from zinf.program import ArrayId, ArraySpec

FILE = "manifest.json"
FORMAT_VERSION = 1
MAX_DIFFERENCES_SHOWN = 5


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    specs: the arrays of the checkpoint, by their ids as wholes.
    scalars: step, loss scale, random key and the like, as JSON values.
    """

    specs: Mapping[ArrayId, ArraySpec]
    scalars: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write the manifest, the last file of a checkpoint, at once and for good.

        Raises:
            StorageError: it cannot be written.
        """
        content = {
            "about": "A checkpoint of zinf: one zarr v3 array per entry of arrays, in "
            "role/path.",
            "format_version": FORMAT_VERSION,
            "zinf_version": _zinf_version(),
            "arrays": [
                {"role": array.role, "path": array.path, **asdict(spec)}
                for array, spec in self.specs.items()
            ],
            "scalars": self.scalars,
        }
        content["crc32"] = _checksum(content)
        try:
            fresh = directory / f"{FILE}.new"
            with fresh.open("w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(directory / FILE)
            sync_folder(directory)
        except OSError as error:
            raise failure("Cannot write the manifest", directory, error) from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`, its checksum verified.

    Raises:
        FileNotFoundError: there is none: no checkpoint, or one whose saving was cut
            short.
        StorageError: it cannot be read, or is damaged.
        ValueError: it is of a later format.
    """
    path = directory / FILE
    try:
        content = json.loads(path.read_text())
        crc32 = content.pop("crc32")
        is_sound = crc32 == _checksum(content)
    except FileNotFoundError as error:
        raise FileNotFoundError(_not_found(directory)) from error
    except OSError as error:
        raise failure("Cannot read the manifest", path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if not is_sound:
        raise _damaged(path)
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"Checkpoint {directory} has format {content['format_version']}, written "
            f"by zinf {content['zinf_version']}; this zinf reads format "
            f"{FORMAT_VERSION}. Use that version of zinf."
        )
    return Manifest(dict(map(_entry, content["arrays"])), content["scalars"])


def check_same(saved: Manifest, specs: Mapping[ArrayId, ArraySpec], name: Path) -> None:
    """Raise ValueError unless the arrays of `saved` are exactly `specs`."""
    found = list(differences(saved.specs, specs))
    if not found:
        return
    lines = [f"  {line}" for line in found[:MAX_DIFFERENCES_SHOWN]]
    if len(found) > len(lines):
        lines.append(f"  and {len(found) - len(lines)} more")
    raise ValueError(
        "\n".join(
            (
                f"Checkpoint {name} is of another run than this one; of "
                f"{len(saved.specs)} arrays there and {len(specs)} here, "
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
    """One line for each array that is not the same there and here."""
    for array in (*here, *(a for a in saved if a not in here)):
        there = saved.get(array)
        if there != here.get(array):
            yield f"{array}: {_shown(there)} there, {_shown(here.get(array))} here"


def sync_folder(folder: Path) -> None:
    """Make what was renamed in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shown(spec: ArraySpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def _entry(saved: Mapping[str, Any]) -> tuple[ArrayId, ArraySpec]:
    spec = ArraySpec(tuple(saved["shape"]), saved["dtype"], saved["itemsize"])
    return ArrayId(saved["role"], saved["path"]), spec


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _zinf_version() -> str:
    try:
        return version("zinf")
    except PackageNotFoundError:
        return "not installed"


def _not_found(directory: Path) -> str:
    if not directory.exists():
        return f"There is no checkpoint {directory}."
    return (
        f"{directory} has no {FILE}: it is not a checkpoint, or saving it was cut "
        "short. Use another one."
    )


def _damaged(path: Path) -> OSError:
    found = "its content does not match its checksum"
    return explain("Cannot read the manifest", errno.EIO, path, found)
