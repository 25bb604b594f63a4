"""Compiles all ops of zinf_kernels for GPUs that are absent; prints what they use.

    python scripts/bench/kernel_report.py [--json FILE] [--gpu H200 ...]

For each op, case and GPU it prints the default implementation there; the other kernels
that can run, marked with a plus; and why the rest cannot run. For each of them it
prints bytes of temporary memory, and for kernels registers per thread, bytes spilled
and shared memory per block (not reported by jax before 0.11): the largest value of all
kernels of the op. It needs the wheels that `zinf_kernels.absent_gpu` names; without
them it says so and prints only which implementations run. Exits with 1 if something
does not compile.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

PTXAS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads_bytes": re.compile(r"(\d+) bytes spill loads"),
}
SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write all rows")
    parser.add_argument("--gpu", nargs="*", help="which GPUs; by default all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Must be set before jax is imported.
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        rows = report(options.gpu, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any("error" in row for row in rows))


def report(names: list[str] | None, folder: Path) -> list[dict[str, Any]]:
    """Prints and returns one row per problem, GPU and implementation."""
    absent_gpu = import_module("zinf_kernels.absent_gpu")
    kernel_cases = import_module("kernel_cases")
    missing = absent_gpu.why_not()
    if missing:
        print(f"Nothing is compiled. {missing}\n")
    heads = "gpu", "implementation", "registers", "spilled", "shared", "temporary"
    print(f"{'op and case':38}{heads[0]:6}", *(f"{head:>14}" for head in heads[1:]))
    rows: list[dict[str, Any]] = []
    kernels: dict[Any, Any] = {}
    for problem in kernel_cases.problems(kernel_cases.FULL):
        for name in names or absent_gpu.GPUS:
            gpu = absent_gpu.GPUS[name]
            for implementation in problem.worth_compiling(gpu.device):
                row = described(problem, implementation, name)
                if missing:
                    row["not_compiled"] = missing
                else:
                    row |= built(problem, implementation, gpu, folder)
                # GPUs of the same compute capability share a kernel. It is compiled for
                # the first of them, so the others take their figures from there.
                same = problem.name, implementation, gpu.capability
                if "kernels" in row:
                    kernels[same] = row["kernels"]
                elif same in kernels:
                    row["kernels"] = kernels[same]
                print(line(problem.name, row), flush=True)
                rows.append(row)
    obstacles = {pair for row in rows for pair in row["obstacles"].items()}
    print("", *sorted(f"{name}: {why}" for name, why in obstacles), sep="\n")
    return rows


def described(problem: Any, implementation: str, name: str) -> dict[str, Any]:
    """The columns of a row that need no compiler."""
    device = import_module("zinf_kernels.absent_gpu").GPUS[name].device
    return {
        "op": problem.op,
        "case": problem.case,
        "gpu": name,
        "implementation": implementation,
        "is_chosen": implementation == problem.chosen(device),
        "obstacles": problem.obstacles(device),
    }


def built(problem: Any, implementation: str, gpu: Any, folder: Path) -> dict[str, Any]:
    """What the compilers report on one problem and GPU, or their error."""
    absent_gpu = import_module("zinf_kernels.absent_gpu")
    for left in folder.iterdir():
        left.unlink()
    start = time.perf_counter()
    try:
        with quiet():
            made = absent_gpu.compile_for(
                gpu, problem.run(implementation), *problem.specs
            )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    row = {"compile_seconds": time.perf_counter() - start}
    row["temporary_bytes"] = made.memory_analysis().temp_size_in_bytes
    said = sorted(folder.glob("*.ptxas"))
    programs = sorted(folder.glob("*.before_layout_inference.txt"))
    if not said:
        return row
    return row | {"kernels": [resources(*p) for p in zip_longest(said, programs)]}


@contextmanager
def quiet() -> Iterator[None]:
    """Discards stderr, to which Mosaic writes that it finds no disassembler."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def resources(said: Path, program: Path | None) -> dict[str, int | None]:
    """Resources of one kernel, from the output of ptxas and the dumped program."""
    texts = [(said.read_text(), name, found) for name, found in PTXAS.items()]
    if program is not None:
        texts.append((program.read_text(), "shared_bytes", SHARED))
    found = {name: pattern.search(text) for text, name, pattern in texts}
    return {name: int(match[1]) if match else None for name, match in found.items()}


def line(name: str, row: dict[str, Any]) -> str:
    mark = " " if row["is_chosen"] else "+"
    head = f"{name:37}{mark}{row['gpu']:6} {row['implementation']:>14}"
    if "error" in row:
        return f"{head} {row['error'].splitlines()[0]}"
    names = "registers", "spill_stores_bytes", "spill_loads_bytes", "shared_bytes"
    most = [largest(row.get("kernels", ()), name) for name in names]
    spilled = None if None in most[1:3] else sum(most[1:3])
    cells = most[0], spilled, most[3], row.get("temporary_bytes")
    texts = ("-" if cell is None else f"{cell:,}" for cell in cells)
    return " ".join([head, *(f"{text:>14}" for text in texts)])


def largest(kernels: Any, name: str) -> int | None:
    """Largest value of one resource over all kernels; None if one is unknown."""
    found = [kernel.get(name) for kernel in kernels]
    return None if not found or None in found else max(found)


if __name__ == "__main__":
    main()
