"""Kills, stops and cuts off workers of a Ray run at random instants; checks the losses.

    python scripts/faults/kill_ray.py [--faults 30] [--workers 2] [--min-workers 2]
        [--seed 0] [--no-network]

A small run on a cluster of this machine saves every other step. In each attempt a
random worker meets a fault: SIGKILL, SIGSTOP, or the loss of its node's network. Two of
three faults come at a random instant after the attempt's first step, the others at one
after the start of the worker's process. A node that was cut off returns later.

With as many workers as before, each step's loss, repeated ones included, must be
bit-equal to that of an undisturbed run. With `--min-workers` below `--workers` there is
no spare node: the run goes on with fewer workers, and with more when the node returns.
Sums are then taken in another order, and a loss may differ by RELATIVE of itself.

Prints for each fault the seconds to the first step after it: until zinf notices, until
all workers have joined anew, to plan and compile, to load the checkpoint, and for the
step itself.

Nodes are network namespaces, which need root (`ray_nodes.py`). Without, or with
`--no-network`, all workers are on one node, nothing is cut off, and a line says so.
"""

import argparse
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# `ray start` asks for a token.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
from ray_nodes import Nodes, ancestors, processes, why_not

import zinf
from zinf.checkpoint import Checkpoints
from zinf.data import Share
from zinf.distributed import Limits
from zinf.ray import Attempt, FailureConfig, Fitted, RayGroup, ScalingConfig, fit
from zinf.ray.cluster import alive
from zinf.ray.record import seconds_to_recover

WIDTH, BATCH, NUM_STEPS = 16, 12, 60
PAUSE_SECONDS = 0.2  # before each step, so that many instants are within training
TRAINING_SHARE = 2 / 3  # of the faults come after a first step
EARLY_SECONDS = 15.0  # after the start of a worker, in which another one comes
LATE_SECONDS = 8.0  # after the first step
FIRST_STEP_SECONDS = 120.0
CUT_SECONDS = 20.0  # until a node returns
SILENCE_SECONDS = 10.0
# At other numbers of workers, sums over the batch are taken in another order: a few of
# float32's last bits, through a hundred steps of Adam.
RELATIVE = 1e-5
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


class Faults:
    """A thread that ends one worker of each attempt, until it ended enough.

    Attributes:
        struck: time and kind of each fault, by the process id.
        stepped: set when the attempt that runs has done a step.
    """

    def __init__(self, count: int, fewest: int, nodes: Nodes | None, seed: int) -> None:
        self.count, self.fewest, self.nodes = count, fewest, nodes
        self.drawn = random.Random(seed)
        self.kinds = ("SIGKILL", "SIGSTOP", "CUT") if nodes else ("SIGKILL", "SIGSTOP")
        self.struck: dict[int, tuple[float, str]] = {}
        self.seen: set[int] = set()
        self.stepped = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return len(self.struck) >= self.count

    def run(self) -> None:
        while not self.is_done:
            workers: set[int] = set()
            while len(workers) < self.fewest:
                time.sleep(0.05)
                workers = own_workers() - self.seen
            self.stepped.clear()
            if self.drawn.random() < TRAINING_SHARE:
                self.stepped.wait(FIRST_STEP_SECONDS)
                time.sleep(self.drawn.uniform(0, LATE_SECONDS))
            else:
                time.sleep(self.drawn.uniform(0, EARLY_SECONDS))
            # The others of this attempt may have started later.
            workers = own_workers() - self.seen
            self.seen.update(workers)
            if workers:
                self.strike(self.drawn.choice(sorted(workers)))

    def strike(self, victim: int) -> None:
        kind = self.kinds[len(self.struck) % len(self.kinds)]
        self.struck[victim] = time.time(), kind
        print(f"{kind} of process {victim}", file=sys.stderr)
        if kind != "CUT":
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.Signals[kind])
            return
        assert self.nodes is not None
        node = self.nodes.of(victim)
        if node is None:  # it has just ended
            del self.struck[victim]
            return
        self.nodes.cut(node)
        threading.Timer(CUT_SECONDS, self.nodes.heal, [node]).start()


def own_workers() -> set[int]:
    """Process ids of the workers of this process's cluster that run the function."""
    found = list(processes())
    table = {pid: parent for pid, parent, _ in found}
    return {
        pid
        for pid, _, command in found
        if command.startswith("ray::Worker.run")
        and os.getpid() in ancestors(pid, table)
    }


def run(
    folder: Path,
    scaling: ScalingConfig,
    pause_seconds: float,
    stepped: threading.Event | None = None,
) -> tuple[Fitted, list[tuple[int, float]]]:
    """A run that restarts as often as it must, and the loss of each step it took."""
    found: list[tuple[int, float]] = []

    def hear(metrics: Mapping[str, Any]) -> None:
        found.append((metrics["step"], metrics["loss"]))
        if stepped is not None:
            stepped.set()

    fitted = fit(
        partial(train, folder=folder, pause_seconds=pause_seconds),
        scaling=scaling,
        failure=FailureConfig(max_failures=-1),
        storage=folder,
        limits=Limits(silence_seconds=SILENCE_SECONDS),
        on_metrics=hear,
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
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-network", action="store_true")
    options = parser.parse_args()
    why = "--no-network" if options.no_network else why_not()
    if why:
        print(f"no network is cut: {why}")
        check(options, None)
        return
    fewest = options.min_workers or options.workers
    # A spare node, unless the run is to go on with fewer workers.
    with Nodes(options.workers + (fewest == options.workers)) as nodes:
        ray.init(
            address=nodes.address,
            _node_ip_address=nodes.head,
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            while len(alive()) <= nodes.count:
                time.sleep(1)
            check(options, nodes)
        finally:
            ray.shutdown()


def check(options: argparse.Namespace, nodes: Nodes | None) -> None:
    most, fewest = options.workers, options.min_workers or options.workers
    fixed = ScalingConfig(most)
    scaling = ScalingConfig((fewest, most), elastic_resize_monitor_interval_s=3.0)
    with tempfile.TemporaryDirectory() as name:
        _, steps = run(Path(name) / "undisturbed", fixed, 0.0)
        expected = dict(steps)
        assert len(set(expected.values())) == NUM_STEPS
        faults = Faults(options.faults, fewest, nodes, options.seed)
        runs: list[Fitted] = []
        taken: list[tuple[int, float]] = []
        while not faults.is_done:
            folder = Path(name) / f"disturbed {len(runs)}"
            fitted, steps = run(folder, scaling, PAUSE_SECONDS, faults.stepped)
            assert {step for step, _ in steps} == set(expected)
            runs.append(fitted)
            taken += steps
            print(f"{len(faults.struck)} faults, {len(fitted.attempts)} attempts")
    errors = [abs(loss / expected[step] - 1) for step, loss in taken]
    print_table(runs, faults)
    again = len(taken) - NUM_STEPS * len(runs)
    differing = sum(error > 0 for error in errors)
    print(
        f"{len(taken)} steps, {again} of them again; {differing} losses are not "
        f"bit-equal, the largest relative error is {max(errors):.2g}"
    )
    assert max(errors) <= (0.0 if fewest == most else RELATIVE)


def print_table(runs: Sequence[Fitted], faults: Faults) -> None:
    print("fault    ", *(f"{name:>8}" for name in PARTS), "  last words")
    rows: dict[str, list[Mapping[str, float | None]]] = {}
    in_training = 0
    for before, after in (pair for one in runs for pair in pairwise(one.attempts)):
        victims = faults.struck.keys() & before.pids.values()
        if not victims:  # it met the fault before it joined, or the run only resized
            continue
        at, kind = faults.struck[victims.pop()]
        row = recovery(before, after, at)
        rows.setdefault(kind, []).append(row)
        said = before.events[-1].text if before.events else "nothing"
        in_training += before.first("done with step") is not None
        counts = f"{before.count} -> {after.count}"
        print(f"{kind:9}", *map(written, row.values()), f"  {counts}  {said}")
    for kind, found in rows.items():
        values = {n: [r[n] for r in found if r[n] is not None] for n in PARTS}
        medians = [median(v) if v else None for v in values.values()]
        print(f"{kind:9}", *map(written, medians), f"  median of {len(found)}")
    attempts = sum(len(one.attempts) for one in runs)
    told = sum(map(len, rows.values()))
    print(
        f"{len(faults.struck)} faults, {told} of them after all had joined, "
        f"{in_training} after a step; {len(runs)} runs, {attempts} attempts"
    )


def written(seconds: float | None) -> str:
    return "       -" if seconds is None else f"{seconds:8.2f}"


if __name__ == "__main__":
    main()
