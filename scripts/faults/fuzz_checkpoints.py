"""Damages a small checkpoint in thousands of ways, and loads it each time.

    python scripts/faults/fuzz_checkpoints.py [--cases 2000] [--seed 0] [--only CASE]

A case changes one to three places in manifest, zarr.json or chunk files: bits, lengths,
files that are swapped, lost or links to elsewhere, and values of the manifest, mostly
with a checksum that is right again, as somebody would make who means harm. Then it is
opened, verified, read, exported, and restored into a run. Each has to refuse it with a
ValueError, a StorageError or a FileNotFoundError, or give what was saved, bit for bit;
`verify` has to find damage exactly if reading refuses; and nothing but the export may
be written. A failure prints its case, which `--only` repeats. The exit code is 1 then.
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
from zinf.interchange import export_safetensors
from zinf.interchange.safetensors_files import SafetensorsFiles
from zinf.memory import Residents, StorageError, open_stores
from zinf.program import ArrayId, ArraySpec, Role, Tier

REFUSALS = (ValueError, StorageError, FileNotFoundError)
# A case that takes longer does something that a size in a file told it to.
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
# What somebody might put where a number, a name or a list is expected.
VALUES = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**59, 2**63, 10**40, 0.5, 1e308, float("nan")),
    *("", ".", "..", "../../outside", "/etc/passwd", "a\0b", "x" * 300, "\ud800"),
    *("float32", "object", "float64", "int4", "bfloat16", "0" * 16, "f" * 16),
    *([], [1], [[]], [0, 0], [2**40, 2**40], ["0" * 16], {}, {"a": 1}, [None] * 40),
)
Choose = random.Random


@dataclass(frozen=True)
class Case:
    """What came of one case: how it was refused, if it was, or what is wrong."""

    refused_by: str | None
    problem: str | None = None


class Fuzzed:
    """A checkpoint that is damaged, loaded and mended again and again.

    Args:
        folder: where to work; `folder/checkpoint` is the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.arrays = folder, ARRAYS
        self.checkpoint = folder / "checkpoint"
        specs = {
            array: ArraySpec(x.shape, x.dtype.name, x.dtype.itemsize)
            for array, x in ARRAYS.items()
        }
        homes = dict.fromkeys(ARRAYS, Tier.HOST)
        self.residents = Residents(open_stores(jax.devices()[0]), specs, homes)
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
        """One case, the same each time."""
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
        """Changes one place; returns the files that are not as they were."""
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
        """Changes values of the manifest, and mostly its checksum with them."""
        content = json.loads(self.files[Path(FILE)])
        for _ in range(choose.randint(1, 3)):
            change_value(content, choose)
        if choose.random() < 0.8:
            sign(content)
        text = json.dumps(content)
        replace(self.checkpoint / FILE, text.encode("utf-8", "surrogatepass"))

    def load(self) -> Case:
        """Opens, reads, verifies, restores and exports what is there now."""
        try:
            with Saved(self.checkpoint) as saved:
                problem, refused = self.read(saved)
                problem = problem or self.export(saved)
        except REFUSALS as error:
            problem, refused = None, type(error).__name__
        return Case(refused, problem or self.restore())

    def read(self, saved: Saved) -> tuple[str | None, str | None]:
        """`(what is wrong, how some array was refused)`."""
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
        """Into a run, whose arrays are zero before."""
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
        """Every file and folder, with what would change if it were written."""
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
    """A new file, so that nothing is written through a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def changed_bytes(content: bytes, choose: Choose) -> bytes:
    """Other bytes: some flipped, lost, more, zeroed, repeated or of chance."""
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
    """Changes one value, somewhere in a tree of JSON."""
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
    """Puts the checksum in that a manifest of this content has to have."""
    content.pop("checksum", None)
    content["checksum"] = checksum_of(content)


def fuzz(fuzzed: Fuzzed, *, cases: range, seed: int) -> tuple[Counter, list[str]]:
    """`(how often it was refused how, what is wrong)`."""
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
