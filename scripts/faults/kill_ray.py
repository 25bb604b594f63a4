"""Kills and stops workers of a Ray run at random instants; checks that no loss changes.

    python scripts/faults/kill_ray.py [--kills 30] [--workers 2] [--seed 0]

A small run on a cluster of this machine saves every other step. In each attempt a
random worker gets SIGKILL, or in one of three attempts SIGSTOP, at a random instant
between the start of its process and a later step. Each step's loss, repeated ones
included, must be bit-equal to that of an undisturbed run. Prints for each kill the
seconds to the first step after it: until zinf notices, until all workers have joined
anew, to plan and compile, to load the checkpoint, and for the step itself.

Networks are not cut: that needs hosts, or network namespaces and root.
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from zinf.checkpoint import Checkpoints
from zinf.data import Share
from zinf.distributed import Limits
from zinf.ray import Attempt, FailureConfig, Fitted, RayGroup, ScalingConfig, fit
from zinf.ray.record import seconds_to_recover

WIDTH, BATCH, NUM_STEPS = 16, 12, 100
PAUSE_SECONDS = 0.2  # before each step, so that many instants are within training
LATEST_SECONDS = 15.0  # after the start of a worker, by which it is killed
SILENCE_SECONDS = 5.0
PARTS = ("notice", "restart", "compile", "load", "step")


def init() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) for i, k in enumerate(keys)}


def loss(params: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ params["w0"])
    return jnp.mean((hidden @ params["w1"] - batch) ** 2)


def train(group: RayGroup, folder: Path, pause_seconds: float) -> None:
    drawn = np.random.default_rng(0).normal(size=(BATCH * NUM_STEPS, WIDTH))
    samples = grain.MapDataset.source(list(drawn.astype(np.float32)))
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 3},
        "persistence_threshold": 1,
    }
    engine = zinf.initialize(loss, init, optax.adam(1e-3), config, group=group)

    def describe(batch: Any) -> Mapping[str, int]:
        time.sleep(pause_seconds)
        return {}

    with Checkpoints(folder / "checkpoints") as checkpoints:
        zinf.Trainer(
            engine,
            Share(samples, BATCH, process=(group.index, group.count)),
            steps=NUM_STEPS,
            checkpoints=checkpoints,
            checkpoint_every=2,
            describe=describe,
        ).run()


class Killer:
    """A thread that ends one worker of each attempt, until it ended enough.

    Attributes:
        kills: time and signal of each kill, by the process id.
    """

    def __init__(self, num_kills: int, num_workers: int, seed: int) -> None:
        self.num_kills, self.num_workers = num_kills, num_workers
        self.drawn = random.Random(seed)
        self.kills: dict[int, tuple[float, signal.Signals]] = {}
        self.seen: set[int] = set()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while len(self.kills) < self.num_kills:
            workers: list[int] = []
            while len(workers) < self.num_workers:
                time.sleep(0.05)
                workers = sorted(own_workers() - self.seen)
            self.seen.update(workers)
            time.sleep(self.drawn.uniform(0, LATEST_SECONDS))
            number = self.drawn.choice([signal.SIGKILL] * 2 + [signal.SIGSTOP])
            victim = self.drawn.choice(workers)
            if victim in own_workers():
                os.kill(victim, number)
                self.kills[victim] = time.time(), number


def own_workers() -> set[int]:
    """Process ids of the workers of this process's cluster that run the function."""
    parents = {pid: parent for pid, parent, _ in processes()}
    return {
        pid
        for pid, parent, command in processes()
        if command.startswith("ray::Worker.run") and parents.get(parent) == os.getpid()
    }


def processes() -> Iterator[tuple[int, int, str]]:
    """Process id, that of the parent, and command line of each process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
                command = (folder / "cmdline").read_text()
            except OSError:
                continue  # it has ended
            parent = int(stat.rpartition(")")[2].split()[1])
            yield int(folder.name), parent, command


def run(folder: Path, num_workers: int, pause_seconds: float) -> tuple[Fitted, list]:
    """A run that restarts as often as it must, and the loss of each step it took."""
    found: list[tuple[int, float]] = []
    fitted = fit(
        partial(train, folder=folder, pause_seconds=pause_seconds),
        scaling=ScalingConfig(num_workers),
        failure=FailureConfig(max_failures=-1),
        storage=folder,
        limits=Limits(silence_seconds=SILENCE_SECONDS),
        on_metrics=lambda metrics: found.append((metrics["step"], metrics["loss"])),
        say=lambda line: None,
    )
    return fitted, found


def recovery(
    before: Attempt, after: Attempt, killed: float
) -> Mapping[str, float | None]:
    parts = {"notice": before.noticed - killed, **seconds_to_recover(before, after)}
    return {name: parts.get(name) for name in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        _, steps = run(Path(name) / "undisturbed", options.workers, 0.0)
        expected = dict(steps)
        assert len(set(expected.values())) == NUM_STEPS
        killer = Killer(options.kills, options.workers, options.seed)
        runs: list[Fitted] = []
        num_steps = 0
        while len(killer.kills) < options.kills:
            folder = Path(name) / f"killed {len(runs)}"
            fitted, steps = run(folder, options.workers, PAUSE_SECONDS)
            differ = [step for step, loss in steps if loss != expected[step]]
            assert not differ, f"the losses of steps {differ} are not those undisturbed"
            assert {step for step, _ in steps} == set(expected)
            runs.append(fitted)
            num_steps += len(steps)
    print_table(runs, killer)
    again = num_steps - NUM_STEPS * len(runs)
    print(f"{num_steps} steps, {again} of them again: every loss was bit-equal")


def print_table(runs: Sequence[Fitted], killer: Killer) -> None:
    print("signal   ", *(f"{name:>8}" for name in PARTS), "  last words")
    rows: dict[signal.Signals, list[Mapping[str, float | None]]] = {}
    pairs = [pair for one in runs for pair in pairwise(one.attempts)]
    for before, after in pairs:
        killed = killer.kills.keys() & before.pids.values()
        if not killed:  # killed before it joined
            continue
        at, number = killer.kills[killed.pop()]
        row = recovery(before, after, at)
        rows.setdefault(number, []).append(row)
        said = before.events[-1].text if before.events else "nothing"
        print(f"{number.name:9}", *map(written, row.values()), f"  {said}")
    for number, found in rows.items():
        values = {n: [r[n] for r in found if r[n] is not None] for n in PARTS}
        medians = [median(v) if v else None for v in values.values()]
        print(f"{number.name:9}", *map(written, medians), f"  median of {len(found)}")
    attempts = sum(len(one.attempts) for one in runs)
    print(f"{len(killer.kills)} kills, {len(runs)} runs, {attempts} attempts")


def written(seconds: float | None) -> str:
    return "       -" if seconds is None else f"{seconds:8.2f}"


if __name__ == "__main__":
    main()
