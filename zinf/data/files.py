"""Finds the files of a dataset: their kinds, and which are skipped and why."""

import os
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

STDLIB = "stdlib"
# Folders of the standard library that are left out: installed packages differ between
# machines, and tests contain tables and broken encodings.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests"})
# A file is judged to be text or binary by this many bytes at its start.
SNIFFED_BYTES = 8192
# A file with a larger share of bytes that are not UTF-8 is binary. Not 0, as text in an
# old 8-bit encoding has a few such bytes.
MAX_NOT_UTF8 = 0.1
SHOWN_NAMES = 5


class Kind(StrEnum):
    """What a file holds. Its suffix decides; with any other suffix it is text."""

    TEXT = "text"
    JSON_LINES = "JSON lines"
    PARQUET = "parquet"
    TOKENS = "tokens"


SUFFIXES = {
    ".jsonl": Kind.JSON_LINES,
    ".ndjson": Kind.JSON_LINES,
    ".parquet": Kind.PARQUET,
    ".npy": Kind.TOKENS,
    ".bin": Kind.TOKENS,
}


@dataclass(frozen=True)
class Found:
    """The files of a dataset.

    Attributes:
        files: each file and its kind, in the same order on every run.
        skipped: the files that are left out, by reason.
    """

    files: tuple[tuple[Path, Kind], ...]
    skipped: dict[str, tuple[Path, ...]]

    def summary(self) -> str:
        """A line with the number of files by kind, and a line per reason to skip."""
        counts: dict[str, int] = defaultdict(int)
        for _, kind in self.files:
            counts[kind] += 1
        nbytes = sum(path.stat().st_size for path, _ in self.files)
        kinds = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
        lines = [f"data: {len(self.files):,} files ({kinds}), {nbytes:,} bytes"]
        for reason, paths in self.skipped.items():
            names = ", ".join(path.name for path in paths[:SHOWN_NAMES])
            more = ", ..." if len(paths) > SHOWN_NAMES else ""
            lines.append(f"data: {len(paths):,} skipped, {reason}: {names}{more}")
        return "\n".join(lines)


def find_files(paths: Sequence[str], glob: str | None = None) -> Found:
    """The files that `paths` name.

    Args:
        paths: Each is a file, which is never skipped; a folder, searched to any depth;
            or "stdlib", Python's standard library without installed packages and tests
            (write "./stdlib" for a folder of that name).
        glob: Pattern of file names to take from folders, such as "*.py". The default is
            all files, but "*.py" for the standard library. Hidden, empty and binary
            files in folders are skipped.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: `paths` is empty, a folder has nothing to read, or there are both
            texts and token arrays, whose tokens have different meanings.
    """
    if not paths:
        raise ValueError(
            f"No paths to read text from. Name files, folders or {STDLIB!r}."
        )
    files: dict[Path, Kind] = {}  # a file named twice is read once
    skipped: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        root = _root(path)
        if root.is_file():
            files[root] = SUFFIXES.get(root.suffix.lower(), Kind.TEXT)
            continue
        names = "*.py" if path == STDLIB and glob is None else glob or "*"
        here = _files_below(root, names, is_stdlib=path == STDLIB)
        if not here:
            raise ValueError(
                f"No file in folder {str(root)!r} matches {names!r}. Name another "
                "folder or file in data.paths, or another pattern in data.glob."
            )
        count = len(files)
        for file in here:
            reason = _reason_to_skip(file, root)
            if reason is not None:
                skipped[reason].append(file)
            elif file not in files:
                files[file] = SUFFIXES.get(file.suffix.lower(), Kind.TEXT)
        if len(files) == count and not any(file in files for file in here):
            reasons = ", ".join(skipped)
            raise ValueError(
                f"Folder {str(root)!r} has {len(here):,} files named {names!r}, but "
                f"nothing to read: {reasons}. Text, JSON lines (.jsonl), parquet and "
                "token arrays (.npy, .bin) can be read; unpack what is compressed."
            )
    _check_alike(files)
    reasons = {reason: tuple(found) for reason, found in skipped.items()}
    return Found(tuple(files.items()), reasons)


def _root(path: str) -> Path:
    if path == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(
            f"There is no file or folder {str(root)!r} to read text from (relative "
            f"paths start at {str(Path.cwd())!r})."
        )
    return root


def _files_below(root: Path, glob: str, *, is_stdlib: bool) -> list[Path]:
    if not is_stdlib:
        return [file for file in sorted(root.rglob(glob)) if file.is_file()]
    # Installed packages may have many times as many files, so they are not listed.
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_STDLIB]
        found += [Path(folder, name) for name in names if name not in NOT_STDLIB]
    if "**" in glob:  # `match` knows it from Python 3.13 on.
        matching = set(found).intersection(root.rglob(glob))
    else:
        matching = {file for file in found if file.match(glob)}
    return sorted(file for file in matching if file.is_file())


def _reason_to_skip(file: Path, root: Path) -> str | None:
    parts = file.relative_to(root).parts
    if any(part.startswith(".") or part == "__pycache__" for part in parts):
        return "hidden"
    if file.stat().st_size == 0:
        return "empty"
    if file.suffix.lower() not in SUFFIXES and not _is_text(file):
        return "binary, no text"
    return None


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        start = stream.read(SNIFFED_BYTES)
    lost = len(start) - len(start.decode("utf-8", "ignore").encode())
    return b"\0" not in start and lost <= MAX_NOT_UTF8 * len(start)


def _check_alike(files: dict[Path, Kind]) -> None:
    """Refuse text beside token arrays: one number would be a byte and also a token."""
    tokens = [path for path, kind in files.items() if kind is Kind.TOKENS]
    texts = [path for path, kind in files.items() if kind is not Kind.TOKENS]
    if tokens and texts:
        raise ValueError(
            f"data.paths has both token arrays ({_names(tokens)}) and text "
            f"({_names(texts)}), which is read as bytes: the same number would stand "
            "for two things. Name only one kind of files in data.paths, or choose with "
            "data.glob, such as --set data.glob='*.bin'."
        )


def _names(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 2:,} more" if len(paths) > 2 else ""
    return ", ".join(path.name for path in paths[:2]) + more
