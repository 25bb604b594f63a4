"""Which files a dataset reads, what each holds, and which are left out, and why."""

import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

STDLIB = "stdlib"
# Installed packages differ between machines; tests hold tables and broken encodings.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests"})
# Enough to tell text from other files.
SNIFFED_BYTES = 8192
# Text in an old 8-bit encoding has a few letters that are not UTF-8.
MAX_NOT_UTF8 = 0.1
SHOWN_NAMES = 5


class Kind(StrEnum):
    """What a file holds, by the end of its name; any other file may be text."""

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
        files: each with what it holds, in an order that is the same on every run.
        skipped: by reason, the files that are left out.
    """

    files: tuple[tuple[Path, Kind], ...]
    skipped: dict[str, tuple[Path, ...]]

    def summary(self) -> str:
        """The files by kind, and each reason to skip files, on a line each."""
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
    """The files that `paths` stand for.

    Args:
        paths: Each a file, read whatever it holds; a folder, searched to any depth; or
            "stdlib", Python's standard library without installed packages or tests (a
            folder of that name is "./stdlib").
        glob: Names to take from folders, such as "*.py". By default all, and "*.py" of
            the standard library. Hidden, empty and binary files are skipped.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: There is nothing to read in a folder, no paths were given, or there
            are both texts and token arrays, whose tokens differ.
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
    files = [file for file in sorted(root.rglob(glob)) if file.is_file()]
    if is_stdlib:
        files = [f for f in files if NOT_STDLIB.isdisjoint(f.relative_to(root).parts)]
    return files


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
    """A vocabulary's tokens and bytes are different numbers for the same text."""
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
