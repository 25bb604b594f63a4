"""The best request size and depth of a drive: measured once and kept on the drive."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from zinf.core.memory.nvme.system import write_new
from zinf.core.memory.storage_error import from_os_error

PROFILE = "zinf-io.json"


class Profile(BaseModel):
    """The request size and depth for a drive, and its speed with them.

    The defaults reach the limit of every drive that we measured (README.md). Blocks of
    1 MiB are up to 30% slower. Beyond blocks of 8 MiB and four at a time little
    changes.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    block_bytes: int = Field(16 * 2**20, ge=4096, multiple_of=4096)
    """Bytes of one request to the kernel."""

    num_threads: int = Field(8, ge=1, le=64)
    """Requests in flight at once: this many reads and this many writes."""

    read_bytes_per_second: float | None = Field(None, gt=0)
    """Measured with these settings; None if nothing was measured."""

    write_bytes_per_second: float | None = Field(None, gt=0)
    """Measured by overwriting existing files."""

    mixed_bytes_per_second: float | None = Field(None, gt=0)
    """Measured with reads and writes at once; bytes of both are counted."""

    measured: str = ""
    """When and on what machine it was measured."""


def find_profile(folder: Path) -> Profile | None:
    """The profile in `folder` or the nearest folder above it on the same file system.

    Raises:
        ValueError: there is a profile, but it is damaged.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    drive = folder.stat().st_dev
    for place in (folder, *folder.parents):
        if place.stat().st_dev != drive:
            return None
        if (place / PROFILE).is_file():
            return _load(place / PROFILE)
    return None


def measured_speeds(folders: Sequence[Path]) -> tuple[float, float] | None:
    """Bytes per second that all drives together read and write, by their profiles.

    None unless every drive has a measured profile.
    """
    reads, writes = 0.0, 0.0
    for folder in folders:
        profile = find_profile(folder)
        if profile is None or not profile.read_bytes_per_second:
            return None
        reads += profile.read_bytes_per_second
        writes += profile.write_bytes_per_second or profile.read_bytes_per_second
    return (reads, writes) if folders else None


def save_profile(profile: Profile, folder: Path) -> Path:
    """Write `profile` into `folder`, replacing the one that is there."""
    file = folder / PROFILE
    try:
        write_new(file, profile.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise from_os_error("Cannot write the profile", file, error) from error
    return file


def _load(file: Path) -> Profile:
    try:
        return Profile.model_validate_json(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is not a valid profile: {error}. Delete the file, or measure "
            f"the drive again with `zinf bench io {file.parent}`."
        ) from error
    except OSError as error:
        raise from_os_error("Cannot read the profile", file, error) from error
