"""Measures how long a checkpoint of a model on NVMe stalls a step, and reading it.

    python scripts/bench/bench_checkpoint.py PATH [--num-layers 24] [--embed-dim 1024]
        [--tokens 64] [--rounds 5]

In each round these are timed in turn: a step alone; the call of a save, for which the
next step has to wait; a step while the save goes on in the background; and a save of
the same arrays by copying every byte (hard links are refused), which is how long a step
would wait without links. Then the files of a checkpoint are read in turn: plainly, as
fast as the drive allows; and as loading does, with every chunk verified. Printed are
medians, and the smallest and largest value.
"""

import argparse
import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import optax

import zinf
from zinf.checkpoint import Checkpoints, Saved, write_arrays
from zinf.core.memory import aligned_empty
from zinf.core.memory.nvme import Drive
from zinf.core.memory.nvme.open_file import Mover
from zinf.core.memory.nvme.request import Request
from zinf.models import GPTConfig, init_and_loss

NUM_AHEAD = 16  # Files that are read at once; enough to keep every thread busy.


def main() -> None:
    options = _parse()
    with TemporaryDirectory(dir=options.path, prefix="zinf-checkpoint-") as name:
        folder = Path(name)
        engine = _engine(options, folder / "nvme")
        rng = np.random.default_rng(0)
        shape = 1, options.tokens + 1
        batch = {"tokens": rng.integers(0, options.vocabulary, shape, np.int32)}
        saves(engine, batch, folder, options.rounds)
        engine.close()
        reads(newest(folder / "saved"), options.rounds)


def saves(
    engine: zinf.Engine, batch: dict[str, np.ndarray], folder: Path, rounds: int
) -> None:
    engine.prepare(batch)
    specs = engine.residents.specs
    nbytes = sum(spec.nbytes for spec in specs.values())
    print(
        f"{len(specs)} arrays of {nbytes / 1e9:.2f} GB, all on nvme: {on_nvme(engine)}"
    )
    for _ in range(2):
        engine.step(batch)
    alone, held, beside, after, complete, copied, streamed = ([] for _ in range(7))
    with Checkpoints(folder / "saved", keep=1) as checkpoints:
        for _ in range(rounds):
            alone.append(timed(lambda: engine.step(batch)))
            begun = time.perf_counter()
            held.append(timed(lambda: checkpoints.save(engine.num_steps, engine, None)))
            copied.append(checkpoints.last_save.snapshot.copied_bytes)
            beside.append(timed(lambda: engine.step(batch)))
            checkpoints.wait()
            complete.append(time.perf_counter() - begun)
            after.append(timed(lambda: engine.step(batch)))
            streamed.append(timed(lambda: stream(engine, folder / "streamed")))
            shutil.rmtree(folder / "streamed")
    show("step alone, s", alone)
    show("held up by a save, s", held)
    show("step beside it, s", beside)
    show("save complete after, s", complete)
    show("step after it, s", after)
    show("bytes copied of nvme", copied, ",.0f")
    show("streaming copy, s", streamed)
    ratio = median(streamed) / median(held)
    print(f"{'copy over held up':<28}{ratio:>10.0f} times")


def stream(engine: zinf.Engine, folder: Path) -> None:
    """Saves all arrays by copying, as on a file system without hard links."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "refused", str(source))

    with mock.patch.object(os, "link", refuse):
        write_arrays(folder, engine.residents, engine.scalars())


def reads(directory: Path, rounds: int) -> None:
    """Times reading every chunk file of a checkpoint, plainly and with verification."""
    plain, verified = [], []
    with Saved(directory) as saved, Drive(directory) as drive:
        nbytes = sum(
            saved.grid(a).chunk_bytes * saved.grid(a).num_chunks for a in saved.arrays
        )
        files = [p for p in directory.rglob("c*") if p.is_file()]
        for _ in range(rounds):
            plain.append(nbytes / 1e9 / timed(lambda: read_plainly(drive, files)))
            verified.append(nbytes / 1e9 / timed(lambda: read_arrays(saved)))
    show("plain read, GB/s", plain)
    show("verified load, GB/s", verified)
    ratios = [b / a for a, b in zip(plain, verified, strict=True)]
    show("verified over plain", ratios)


def read_plainly(drive: Drive, files: list[Path]) -> None:
    def task(path: Path, mover: Mover) -> None:
        size = os.stat(path).st_size
        with mover.open(path, os.O_RDONLY, size) as file:
            file.read(0, aligned_empty((size,), np.uint8))

    under_way: deque[Future] = deque()
    for path in files:
        if len(under_way) == NUM_AHEAD:
            under_way.popleft().result()
        request = Request("Cannot read", 1, lambda: None)
        drive.submit("read", request, [lambda mover, path=path: task(path, mover)])
        under_way.append(request.future)
    for future in under_way:
        future.result()


def read_arrays(saved: Saved) -> None:
    """Reads as a restore does: blocks in order, NUM_AHEAD of them in flight."""
    under_way: deque[Future] = deque()
    for array, spec in saved.arrays.items():
        step = saved.grid(array).chunk[0] if spec.shape else 1
        for start in range(0, spec.shape[0] if spec.shape else 1, step):
            box = tuple((0, size) for size in spec.shape)
            if box:
                box = ((start, min(start + step, spec.shape[0])), *box[1:])
            if len(under_way) == NUM_AHEAD:
                under_way.popleft().result()
            under_way.append(saved.begin_read(array, box))
    for future in under_way:
        future.result()


def on_nvme(engine: zinf.Engine) -> bool:
    return {str(home) for home in engine.residents.homes.values()} == {"nvme"}


def newest(folder: Path) -> Path:
    return max(folder.glob("*/state"), key=lambda p: int(p.parent.name))


def timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def show(name: str, values: list[float], form: str = ".3f") -> None:
    low, middle, high = (
        f"{x:{form}}" for x in (min(values), median(values), max(values))
    )
    print(f"{name:<28}{middle:>10}   ({low} to {high})", flush=True)


def _engine(options: argparse.Namespace, folder: Path) -> zinf.Engine:
    model = GPTConfig(
        num_layers=options.num_layers,
        num_heads=options.embed_dim // 64,
        embed_dim=options.embed_dim,
        vocab_size=options.vocabulary,
        max_length=1024,
    )
    init, loss = init_and_loss(model, seed=0)
    config = {
        "execution": "streamed",
        "memory": {"nvme": [str(folder)], "host": "6GiB", "device": "4GiB"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "persistence_threshold": 1,
    }
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return zinf.initialize(loss, init, tx, config)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", type=Path, help="a folder on the drive")
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--embed-dim", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--tokens", type=int, default=64, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
