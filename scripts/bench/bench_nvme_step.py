"""Times steps with all state on NVMe, from drive-bound to processor-bound.

    python scripts/bench/bench_nvme_step.py PATH [--num-layers 12] [--embed-dim 768]
        [--tokens 128 256 512 1024 2048] [--rounds 5]

For each number of tokens per step it measures, in seconds (medians, in turn):

* the streamed step;
* the fused step of the same model with all state in memory, which does all work of the
  processor (with remat if any segment recomputes);
* the drive alone: the same reads and writes of the same files, each as early as those
  before it allow, with an idle processor;
* "together": the fused step and these reads and writes in two threads that never wait
  for each other. It shows what another order of the same work could reach if the drive
  needs the processor too, as the drive of a virtual machine does. (The streamed step
  may be faster, as it runs other executables.)

The bound is the larger of the second and the third. The step, the serial order (each
instruction alone, one after another) and the prediction with the rates of earlier steps
are printed as ratios.

The speed of a drive depends on the number of bytes: virtual drives serve a few hundred
MB from the memory of their host. So the rates of `zinf bench io` are not used; they are
printed only for comparison.
"""

import argparse
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import zinf
from zinf.core.memory.nvme import measure_drive
from zinf.core.plan import Instruction, Link, Pass, Run, measured_rates, predict
from zinf.core.program import ArrayId
from zinf.core.step.run.links import Progress, run_links
from zinf.models import GPTConfig, init_and_loss

WARM_STEPS = 2


def main() -> None:
    options = _parse()
    drive, _ = measure_drive(options.path, seconds=options.drive_seconds)
    print(
        f"the drive: {drive.read_bytes_per_second / 1e9:.2f} GB/s read, "
        f"{drive.write_bytes_per_second / 1e9:.2f} overwritten, "
        f"{drive.mixed_bytes_per_second / 1e9:.2f} mixed"
    )
    table = Table(
        "tokens", "step", "processor", "drive", "together", "step/bound",
        "step/together", "serial/bound", "predicted/step", box=None,
    )  # fmt: skip
    for tokens in options.tokens:
        table.add_row(f"{tokens:,}", *_row(options, tokens))
    Console(width=130, highlight=False).print(table)


def _row(options: argparse.Namespace, tokens: int) -> list[str]:
    folder = Path(mkdtemp(prefix="zinf-step-", dir=options.path))
    streamed = _engine(options, folder)
    rng = np.random.default_rng(0)
    length = min(tokens, options.length)
    shape = tokens // length, length + 1
    batch = {"tokens": rng.integers(0, options.vocabulary, shape, np.int32)}
    streamed.prepare(batch)
    passes = (i.operation for i in streamed.plan.instructions)
    computes_again = any(isinstance(x, Run) and x.kind == Pass.BACKWARD for x in passes)
    fused = _engine(options, None, remat=computes_again)
    steps: list[float] = []
    predicted: list[float] = []
    serial: list[float] = []
    in_memory: list[float] = []
    on_drive: list[float] = []
    at_once: list[float] = []

    def take(seconds: list[float], action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)

    try:
        for _ in range(WARM_STEPS):
            streamed.step(batch)
            fused.step(batch)
        moves = Moves(streamed)
        contenders = [
            (steps, lambda: streamed.step(batch)),
            (in_memory, lambda: fused.step(batch)),
            (on_drive, moves.run),
            (at_once, lambda: _at_once(moves.run, lambda: fused.step(batch))),
        ]
        # Each step is predicted with the rates of the step before it.
        rates = _rates(streamed)
        for _ in range(options.rounds):
            for contender in random.sample(contenders, len(contenders)):
                take(*contender)
            instructions = streamed.plan.instructions
            predicted.append(predict(instructions, rates).seconds)
            busy = streamed.last_step.timeline.busy_seconds(instructions)
            serial.append(sum(busy.values()))
            rates = _rates(streamed)
    finally:
        streamed.close()
        fused.close()
        shutil.rmtree(folder)
    bound = max(median(in_memory), median(on_drive))
    step = median(steps)
    return [
        f"{step:.2f} ({min(steps):.2f}-{max(steps):.2f})",
        f"{median(in_memory):.2f} ({min(in_memory):.2f}-{max(in_memory):.2f})",
        f"{median(on_drive):.2f} ({min(on_drive):.2f}-{max(on_drive):.2f})",
        f"{median(at_once):.2f}",
        f"{step / bound:.2f}",
        f"{step / median(at_once):.2f}",
        f"{median(serial) / bound:.2f}",
        f"{median(predicted) / step:.2f}",
    ]


class Moves:
    """Runs the NVMe transfers of a plan without its other instructions.

    A transfer waits for the earlier transfers of the same arrays, as in a step. Each
    write writes what was read before, so the files do not change.
    """

    def __init__(self, engine: zinf.Engine) -> None:
        self._store = engine.stores.nvme
        links = Link.NVME_READ, Link.NVME_WRITE
        self._instructions: list[Instruction] = []
        users: dict[ArrayId, list[int]] = {}
        for index, x in enumerate(
            x for x in engine.plan.instructions if x.link in links
        ):
            after: set[int] = set()
            for array in x.operation.arrays:
                after.update(users.get(array.whole, ()))
                users.setdefault(array.whole, []).append(index)
            self._instructions.append(replace(x, after=tuple(sorted(after))))
        # Arrays that were read and not yet written. Empty between runs, as between
        # steps.
        self._contents: dict[ArrayId, np.ndarray] = {}

    def run(self) -> None:
        progress = Progress(len(self._instructions))
        run_links(self._instructions, self._move, progress)
        self._contents.clear()

    def _move(self, instruction: Instruction) -> None:
        arrays, store = instruction.operation.arrays, self._store
        if instruction.link == Link.NVME_READ:
            moves = [store.read(a) for a in arrays]
            for array, move in zip(arrays, moves, strict=True):
                self._contents[array] = move.result()
            return
        for move in [store.write(a, self._content(a)) for a in arrays]:
            move.result()

    def _content(self, array: ArrayId) -> np.ndarray:
        content = self._contents.pop(array, None)
        if content is None:
            start, stop = array.rows
            content = self._contents[array.whole][start:stop]
        return content


def _at_once(*actions: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


def _rates(engine: zinf.Engine):
    step = engine.last_step
    return measured_rates(step.plan.instructions, step.timeline, step.plan.rates)


def _engine(
    options: argparse.Namespace, folder: Path | None, *, remat: bool = False
) -> zinf.Engine:
    model = GPTConfig(
        num_layers=options.num_layers,
        num_heads=options.embed_dim // 64,
        embed_dim=options.embed_dim,
        vocab_size=options.vocabulary,
        max_length=options.length,
        remat=remat,
    )
    init, loss = init_and_loss(model, seed=0)
    config: dict = {"execution": "fused"}
    if folder is not None:
        config = {
            "execution": "streamed",
            "memory": {
                "nvme": [str(folder)],
                "host": options.host,
                "device": options.device,
            },
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
        }
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    return zinf.initialize(loss, init, tx, config)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a folder on the drive")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    default = [128, 256, 512, 1024, 2048]
    parser.add_argument("--tokens", type=int, nargs="+", default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--device", default="1GiB")
    parser.add_argument("--drive-seconds", type=float, default=10.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
