"""Damages a small checkpoint in thousands of ways and tries to load it each time.

    python scripts/faults/fuzz_checkpoints.py [--cases 2000] [--seed 0] [--only CASE]

A case changes one to three places in manifest, zarr.json or chunk files: it flips bits,
changes lengths, swaps or deletes files, replaces them by links, or changes values of
the manifest, mostly with a correct new checksum, as an attacker would. Then the
checkpoint is opened, verified, read, exported, and restored into a run. Each of these
must raise a ValueError, a StorageError or a FileNotFoundError, or give the saved arrays
bit for bit. `verify` must find damage if and only if reading raises. Nothing but the
export may be written. A failed case prints its number, with which `--only` repeats it;
the exit code is then 1.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import ml_dtypes
import numpy as np

from zinf.checkpoint import Saved, read_arrays, write_arrays
from zinf.checkpoint.manifest import FILE, checksum_of
from zinf.core.interchange import export_safetensors
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.core.memory import Residents, StorageError, open_stores
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import layouts_on_one

REFUSALS = (ValueError, StorageError, FileNotFoundError)
# A case that takes longer fails: it has probably trusted a damaged size in a file.
MAX_SECONDS = 5.0
ARRAYS = {
    ArrayId(Role.PARAM, "embed"): np.arange(24, dtype=np.float32).reshape(8, 3),
    ArrayId(Role.MASTER, "embed"): np.arange(24, dtype=np.float32).reshape(8, 3) + 0.5,
    ArrayId(Role.PARAM, "blocks/0/w"): np.linspace(0, 1, 40)
    .reshape(2, 4, 5)
    .astype(ml_dtypes.bfloat16),
    ArrayId(Role.STATE, "embed", slot=0): np.zeros((8, 3), np.float32),
    ArrayId(Role.STATE, "scale", slot=1): np.array(7, np.float32),
    ArrayId(Role.PARAM, "none"): np.zeros((0, 3), np.int32),
}
SCALARS = {"num_steps": 7, "shared": [{"name": "count", "value": 7}], "rng": None}
# Hostile values, which replace a number, a name or a list in the manifest.
VALUES = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**59, 2**63, 10**40, 0.5, 1e308, float("nan")),
    *("", ".", "..", "../../outside", "/etc/passwd", "a\0b", "x" * 300, "\ud800"),
    *("float32", "object", "float64", "int4", "bfloat16", "0" * 16, "f" * 16),
    *([], [1], [[]], [0, 0], [2**40, 2**40], ["0" * 16], {}, {"a": 1}, [None] * 40),
)
Choose = random.Random


@dataclass(frozen=True)
class Case:
    """Result of one case: the error that refused it, if any, and what is wrong."""

    refused_by: str | None
    problem: str | None = None


class Fuzzed:
    """A checkpoint that is damaged, loaded and repaired once per case.

    Args:
        folder: folder for all files; the checkpoint is `folder/checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.arrays = folder, ARRAYS
        self.checkpoint = folder / "checkpoint"
        specs = {
            array: ArraySpec(x.shape, x.dtype.name, x.dtype.itemsize)
            for array, x in ARRAYS.items()
        }
        homes = dict.fromkeys(ARRAYS, Tier.HOST)
        layouts = layouts_on_one(jax.devices()[0], specs)
        self.residents = Residents(open_stores(jax.devices()[0]), layouts, homes)
        for array, content in ARRAYS.items():
            self.residents.write(array, content.copy())
        write_arrays(self.checkpoint, self.residents, SCALARS)
        (folder / "outside").mkdir()
        (folder / "outside" / "file").write_bytes(bytes(range(96)))
        self.files = {
            path.relative_to(self.checkpoint): path.read_bytes()
            for path in sorted(self.checkpoint.rglob("*"))
            if path.is_file()
        }

    def run(self, seed: int, number: int) -> Case:
        """Runs one case; equal arguments give the same case."""
        choose = random.Random(f"{seed}/{number}")
        changed: set[Path] = set()
        for _ in range(choose.randint(1, 3)):
            changed |= self.damage(choose)
        before = self.snapshot()
        start = time.perf_counter()
        try:
            case = self.load()
        except Exception as error:
            case = Case(None, f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        if case.problem is None and seconds > MAX_SECONDS:
            case = Case(case.refused_by, f"it took {seconds:.1f} s")
        if case.problem is None and self.snapshot() != before:
            case = Case(case.refused_by, "something was written")
        self.mend(changed)
        return case

    def damage(self, choose: Choose) -> set[Path]:
        """Changes one place; returns the files that differ from the saved ones."""
        name = choose.choice([*self.files, *[Path(FILE)] * len(self.files)])
        path = self.checkpoint / name
        if name == Path(FILE) and choose.random() < 0.8:
            self.change_manifest(choose)
            return {name}
        content = self.files[name]
        other = choose.choice(list(self.files))
        kind = choose.randrange(8)
        if kind == 0:
            path.unlink(missing_ok=True)
        elif kind == 1:
            path.unlink(missing_ok=True)
            path.symlink_to(choose.choice([self.folder / "outside" / "file", path]))
        elif kind == 2:
            replace(path, self.files[other])
        else:
            replace(path, changed_bytes(content, choose))
        return {name}

    def change_manifest(self, choose: Choose) -> None:
        """Changes one to three values of the manifest; mostly corrects its checksum."""
        content = json.loads(self.files[Path(FILE)])
        for _ in range(choose.randint(1, 3)):
            change_value(content, choose)
        if choose.random() < 0.8:
            sign(content)
        text = json.dumps(content)
        replace(self.checkpoint / FILE, text.encode("utf-8", "surrogatepass"))

    def load(self) -> Case:
        """Opens, reads, verifies, exports and restores the damaged checkpoint."""
        try:
            with Saved(self.checkpoint) as saved:
                problem, refused = self.read(saved)
                problem = problem or self.export(saved)
        except REFUSALS as error:
            problem, refused = None, type(error).__name__
        return Case(refused, problem or self.restore())

    def read(self, saved: Saved) -> tuple[str | None, str | None]:
        """Reads and verifies; returns `(what is wrong, error that refused a read)`."""
        refused = None
        for array, spec in saved.arrays.items():
            try:
                content = saved.read(array)
            except REFUSALS as error:
                refused = type(error).__name__
                continue
            if not self.is_right(array, content):
                return f"{array} was read as {spec}, other than saved", None
        found = any(True for _ in saved.verify())
        if found != (refused is not None):
            return f"verify finds damage: {found}; reading is refused: {refused}", None
        return None, refused

    def export(self, saved: Saved) -> str | None:
        with TemporaryDirectory(dir=self.folder.parent) as folder:
            out = Path(folder) / "out"
            try:
                export_safetensors(saved, out)
            except REFUSALS:
                return (
                    "a refused export left files" if any(out.parent.iterdir()) else None
                )
            with SafetensorsFiles(out) as files:
                for name, spec in files.specs.items():
                    content = files.read(name, tuple((0, n) for n in spec.shape))
                    path = name.replace(".", "/")
                    kept = (ArrayId(role, path) for role in (Role.MASTER, Role.PARAM))
                    if not any(self.is_right(array, content) for array in kept):
                        return f"{name} was exported other than saved"
        return None

    def restore(self) -> str | None:
        """Restores into a run whose arrays are zero; returns what is wrong."""
        for array, content in self.arrays.items():
            self.residents.write(array, np.zeros_like(content))
        try:
            read_arrays(self.checkpoint, self.residents)
        except REFUSALS:
            return None
        for array in self.arrays:
            if not self.is_right(array, self.residents.read(array)):
                return f"{array} was restored other than saved"
        return None

    def is_right(self, array: ArrayId, content: np.ndarray) -> bool:
        expected = self.arrays.get(array)
        return (
            expected is not None
            and (content.dtype, content.shape) == (expected.dtype, expected.shape)
            and content.tobytes() == expected.tobytes()
        )

    def snapshot(self) -> dict[str, Any]:
        """Mode, inode, size and time of every file and folder, to detect writes."""
        found = {}
        for root, folders, files in os.walk(self.folder.parent):
            for name in (*folders, *files):
                path = os.path.join(root, name)
                status = os.lstat(path)
                size = status.st_size if name in files else 0
                time_ns = status.st_mtime_ns if name in files else 0
                found[path] = (status.st_mode, status.st_ino, size, time_ns)
        return found

    def mend(self, changed: set[Path]) -> None:
        for name in changed:
            replace(self.checkpoint / name, self.files[name])


def replace(path: Path, content: bytes) -> None:
    """Writes a new file; an existing link is removed, not followed."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def changed_bytes(content: bytes, choose: Choose) -> bytes:
    """The content with bytes flipped, removed, zeroed, repeated, added, or random."""
    place = choose.randrange(len(content) + 1)
    length = choose.randint(1, max(1, len(content) // 3))
    end = min(len(content), place + length)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: flipped(content, choose),
        lambda: content[:place],
        lambda: content[:place] + content[end:],
        lambda: content[:place] + bytes(end - place) + content[end:],
        lambda: content[:end] + content[place:],
        lambda: choose.randbytes(len(content)),
        lambda: content + choose.randbytes(length),
    )
    return choose.choice(kinds)()


def flipped(content: bytes, choose: Choose) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(choose.choice((1, 1, 1, 8))):
        changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def change_value(content: Any, choose: Choose) -> None:
    """Changes one value at a random place of a JSON tree."""
    inside, key = content, choose.choice(list(content))
    while (
        isinstance(inside[key], dict | list) and inside[key] and choose.random() < 0.9
    ):
        inside = inside[key]
        key = choose.choice(
            list(inside) if isinstance(inside, dict) else range(len(inside))
        )
    kind = choose.randrange(4)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.append(deepcopy(inside[key]))
    elif kind == 2 and isinstance(inside, list):
        other = choose.randrange(len(inside))
        inside[key], inside[other] = inside[other], inside[key]
    else:
        inside[key] = deepcopy(choose.choice(VALUES))


def sign(content: dict[str, Any]) -> None:
    """Sets the checksum that matches the content of the manifest."""
    content.pop("checksum", None)
    content["checksum"] = checksum_of(content)


def fuzz(fuzzed: Fuzzed, *, cases: range, seed: int) -> tuple[Counter, list[str]]:
    """Runs all cases; returns `(number of cases by refusing error, problems)`."""
    counts: Counter[str] = Counter()
    problems = []
    for number in cases:
        case = fuzzed.run(seed, number)
        counts[case.refused_by or "loaded, as saved"] += 1
        if case.problem is not None:
            problems.append(f"case {number}: {case.problem}")
    return counts, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, by its number")
    asked = parser.parse_args()
    cases = range(asked.cases)
    if asked.only is not None:
        cases = range(asked.only, asked.only + 1)
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()
        fuzzed = Fuzzed(inside)
        counts, problems = fuzz(fuzzed, cases=cases, seed=asked.seed)
    for refusal, count in counts.most_common():
        print(f"{count:6} {refusal}")
    seconds = time.perf_counter() - start
    print(f"{len(cases)} cases in {seconds:.0f} s, {len(problems)} problems")
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
