"""Compares the NVMe tier with other ways to move arrays to and from the same drive.

    python scripts/bench/bench_io.py PATH [--sizes 64 256 512] [--rounds 7]
        [--deepspeed-python VENV/bin/python] [--json FILE]

The contenders are the NVMe tier; bare loops of O_DIRECT requests on the tier's files;
and, on their own files of the same sizes in PATH, fio (if installed), TensorStore's
zarr3 and DeepSpeed's DeepNVMe (if that interpreter has it). In each round all of them
run, in random order. The page cache is bypassed; for TensorStore it is dropped (needs
root). Printed are GB/s (median and range of the rounds), processor seconds per GB, and
the rate of the tier over that of the best other contender.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import numpy as np
from io_contenders import (
    MIB,
    OPERATIONS,
    BareLoop,
    DeepNVMe,
    Fio,
    TensorStore,
    Tier,
    filled,
    has_fio,
)
from rich.console import Console
from rich.table import Table

from zinf.core.memory.host.pool import POOL
from zinf.core.memory.nvme import NvmeStore
from zinf.core.program import ArrayId, ArraySpec, Role

SMALL_BYTES = (256, 4096, 64 * 1024, MIB)
SMALL_CALLS = 200
Rates = dict[tuple[str, str], list[float]]


def main() -> None:
    options = _parse()
    scratch = Path(mkdtemp(prefix="zinf-bench-", dir=options.path))
    found = []
    try:
        for size in options.sizes:
            found.append(_bench(options, scratch / f"{size}", size * MIB))
        found.append(_bench_small(options, scratch / "small"))
    finally:
        shutil.rmtree(scratch)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _bench(options: argparse.Namespace, folder: Path, nbytes: int) -> dict:
    """Runs all contenders on arrays of one size."""
    folder.mkdir()
    # Large enough for the pool to keep the memory of every array for the next read.
    POOL.idle_limit_bytes = 2 * nbytes
    contenders = list(_contenders(options, folder, nbytes))
    rates: Rates = {}
    costs: Rates = {}
    for number in range(options.rounds + 1):
        for operation in OPERATIONS:
            for contender in random.sample(contenders, len(contenders)):
                seconds, processor = contender.run(operation)
                if number:  # Round 0 is a warm-up.
                    key = contender.name, operation
                    rates.setdefault(key, []).append(nbytes / seconds / 1e9)
                    costs.setdefault(key, []).append(processor / nbytes * 1e9)
    for contender in contenders:
        contender.close()
    shutil.rmtree(folder)
    filled.cache_clear()
    POOL.trim()
    names = [contender.name for contender in contenders]
    title = f"{nbytes // MIB} MiB, GB/s: median (range), processor s/GB"
    return _report(title, names, rates, costs)


def _contenders(options: argparse.Namespace, folder: Path, nbytes: int):
    tier = Tier(folder / "sampled", nbytes, "sampled")
    yield tier
    yield BareLoop(tier, 8 * MIB, 4)
    yield BareLoop(tier, 16 * MIB, 8)
    yield Tier(folder / "full", nbytes, "full")
    yield Tier(folder / "off", nbytes, "off")
    yield TensorStore(folder / "tensorstore", nbytes)
    if has_fio():
        yield Fio(folder / "fio", nbytes, "libaio", 8)
        yield Fio(folder / "uring", nbytes, "io_uring", 8)
    else:
        print("fio is not installed.")
    if options.deepspeed_python is None:
        print("DeepNVMe is left out: name its interpreter with --deepspeed-python.")
        return
    for block, threads in ((MIB, 1), (8 * MIB, 4)):
        path = folder / f"deepnvme{threads}"
        yield DeepNVMe(path, nbytes, options.deepspeed_python, block, threads)


def _report(title: str, names: list[str], rates: Rates, costs: Rates) -> dict:
    table = Table("", *OPERATIONS, title=title, box=None, title_justify="left")
    for name in names:
        cells = []
        for operation in OPERATIONS:
            rate, cost = rates[name, operation], median(costs[name, operation])
            span = f"({min(rate):.2f}-{max(rate):.2f})"
            cells.append(f"{median(rate):.2f} {span} {cost:.3f}")
        table.add_row(name, *cells)
    ratios = {}
    for tier in [name for name in names if name.startswith("zinf")]:
        for operation in OPERATIONS:
            others = [n for n in names if not n.startswith("zinf")]
            best = max(median(rates[other, operation]) for other in others)
            ratios[f"{tier}: {operation}"] = median(rates[tier, operation]) / best
        cells = [f"{ratios[f'{tier}: {o}']:.3f}" for o in OPERATIONS]
        table.add_row(f"{tier}, over the best other", *cells)
    Console(width=140, highlight=False).print(table, "")
    medians = {" ".join(key): median(value) for key, value in rates.items()}
    return {"title": title, "rates": medians, "ratios": ratios}


def _bench_small(options: argparse.Namespace, folder: Path) -> dict:
    """Latency of one small array at a time, with the page cache as in training."""
    table = Table("us a call", *(f"{n:,} B" for n in SMALL_BYTES), box=None)
    store = NvmeStore([folder])
    medians: dict[str, dict[int, float]] = {}
    for nbytes in SMALL_BYTES:
        value = np.zeros(nbytes, np.uint8)
        array = ArrayId(Role.VALUE, f"{nbytes}")
        store.create(array, ArraySpec(value.shape, "uint8", 1))
        other = TensorStore._open(folder / f"ts{nbytes}", value.view(np.int32))
        calls: dict[str, Callable[[], object]] = {
            "zinf write": lambda array=array, value=value: store.write(
                array, value
            ).result(),
            "TensorStore write": lambda other=other, value=value: other.write(
                value.view(np.int32)
            ).result(),
            "zinf read": lambda array=array: store.read(array).result(),
            "TensorStore read": lambda other=other: other.read().result(),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(SMALL_CALLS):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
        for name, found in times.items():
            medians.setdefault(name, {})[nbytes] = median(found) * 1e6
    store.close()
    for name, row in medians.items():
        table.add_row(name, *(f"{row[nbytes]:.0f}" for nbytes in SMALL_BYTES))
    Console(width=140, highlight=False).print(table)
    return {"title": "us a call", "small": medians}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a folder on the drive")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed-python", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
