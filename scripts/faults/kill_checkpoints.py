"""Kills training at random instants and checks that no saved state is lost.

    python scripts/faults/kill_checkpoints.py [--kills 200] [--seed 0] [--folder PATH]

A small run that saves every other step is killed by SIGKILL and resumed, repeatedly. It
is killed at the nth call of a function in a forward pass, an update, a save, a load, a
rename or a deletion, or after n milliseconds; function and n are random with a fixed
seed. After each kill the newest complete checkpoint must be undamaged, the next process
must resume from it, and every loss must be bit-equal to that of an uninterrupted run.

Each process ("life") is a fork of one that has imported everything and started no
backend: a fork costs a tenth of a new interpreter. Lives share a compilation cache.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from zinf.checkpoint import Checkpoints, Saved, chunk_writer, durable, incomplete
from zinf.checkpoint import snapshot as snapshots
from zinf.checkpoint import storage as storages
from zinf.core.engine.engine import Engine
from zinf.core.memory.residents import Residents
from zinf.core.step.run.run import _StepRun

WIDTH, BATCH, NUM_STEPS = 8, 4, 60
# Where a life may be killed: owner and name of the function, and the largest number of
# the call at which it dies (milliseconds for "clock").
INSTANTS: dict[str, tuple[Any, str, int]] = {
    "forward": (_StepRun, "run", 60),
    "update": (_StepRun, "update_array", 60),
    "snapshot": (snapshots.Snapshot, "_link", 40),
    "save: a file": (chunk_writer, "_write", 120),
    "save: a link": (chunk_writer, "_keep", 60),
    "save: a sync": (chunk_writer, "_sync_folder", 60),
    "manifest": (storages.os, "replace", 3),
    "rename": (durable, "_rename", 6),
    "after a rename": (durable, "sync_folder", 12),
    "load": (Residents, "write_share", 12),
    "deletion": (incomplete.shutil, "rmtree", 6),
    "clock": (None, "", 3000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the drive to use")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        killed, resumed = kill(options.kills, options.seed, Path(name))
    seconds = time.monotonic() - began
    print(f"{sum(killed.values())} kills in {seconds:.0f} s: {dict(killed)}")
    print(f"{resumed} resumed; every loss was that of the undisturbed run")


def kill(num_kills: int, seed: int, folder: Path) -> tuple[Counter[str], int]:
    """Number of kills by instant, and number of lives that resumed a checkpoint.

    Raises:
        AssertionError: a checkpoint was lost or damaged, or a loss differs.
    """
    expected = undisturbed(folder)
    drawn = random.Random(seed)
    killed: Counter[str] = Counter()
    num_resumed = life = 0
    run = folder / "run 0"
    while sum(killed.values()) < num_kills:
        life += 1
        instant = drawn.choice(sorted(INSTANTS))
        call = drawn.randint(1, INSTANTS[instant][2])
        before = newest(run)
        code, log = live(run, folder / f"log {life}", instant, call)
        steps = [(json.loads(x)) for x in log if not x.startswith("resumed")]
        first = [int(x.split()[1]) for x in log if x.startswith("resumed")]
        assert first in ([], [before or 0]), f"resumed {first}, but {before} was there"
        for step, loss in steps:
            assert loss == expected[step], f"step {step}: {loss}, not {expected[step]}"
        if code == -signal.SIGKILL:
            killed[instant] += 1
        else:
            assert code == 0, f"life {life} failed: its output is above"
        num_resumed += bool(before and first)
        check(run, before or 0)
        if code == 0 and newest(run) == NUM_STEPS:
            run = folder / f"run {life}"
    return killed, num_resumed


def check(run: Path, before: int) -> None:
    """Checks that the newest checkpoint is undamaged and not older than `before`."""
    now = newest(run) or 0
    assert now >= before, f"checkpoint {before} is gone; the newest is {now}"
    if now:
        with Saved(run / "saved" / str(now) / "state") as saved:
            assert list(saved.verify()) == []
            assert saved.scalars["num_steps"] == now


def newest(run: Path) -> int | None:
    found = (run / "saved").glob("*")
    return max((int(p.name) for p in found if p.name.isdecimal()), default=None)


def undisturbed(folder: Path) -> dict[int, str]:
    code, log = live(folder / "undisturbed", folder / "log", "", 0)
    assert code == 0, "the undisturbed run failed"
    found = dict(json.loads(x) for x in log if not x.startswith("resumed"))
    assert len(set(found.values())) == NUM_STEPS
    return found


def live(run: Path, log: Path, instant: str, call: int) -> tuple[int, list[str]]:
    """Runs one life in a fork; returns its exit code and the lines that it logged."""
    sys.stdout.flush()
    output = log.with_suffix(".txt")
    pid = os.fork()
    if not pid:
        target = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(target, 1)
        os.dup2(target, 2)
        try:
            train(run, log, instant, call)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        print(output.read_text())
    lines = log.read_text().splitlines() if log.exists() else []
    return code, lines


def train(run: Path, log: Path, instant: str, call: int) -> None:
    run.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(run.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lines = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    with Checkpoints(run / "saved", keep=2) as checkpoints:
        engine = zinf.initialize(
            loss_fn, init, optax.adam(1e-2), config(run), rng=jax.random.key(3)
        )
        report(engine, lines)
        if instant:
            arm(instant, call)
        zinf.Trainer(
            engine,
            data(),
            steps=NUM_STEPS,
            checkpoints=checkpoints,
            checkpoint_every=2,
            log_every=10**6,
        ).run()
        engine.close()


def report(engine: Engine, lines: int) -> None:
    """Makes the engine log the step that it resumes from, and every loss exactly."""
    step, has_begun = engine.step, False

    def logged(batch: Any) -> dict[str, Any]:
        nonlocal has_begun
        if not has_begun:
            os.write(lines, f"resumed {engine.num_steps}\n".encode())
            has_begun = True
        metrics = step(batch)
        entry = [metrics["step"], float(metrics["loss"]).hex()]
        os.write(lines, f"{json.dumps(entry)}\n".encode())
        return metrics

    object.__setattr__(engine, "step", logged)


def arm(instant: str, call: int) -> None:
    """Makes this process kill itself at the given call of the function of `instant`."""
    owner, name, _ = INSTANTS[instant]
    if owner is None:
        threading.Timer(call / 1000, die).start()
        return
    function: Callable[..., Any] = getattr(owner, name)
    lock, calls = threading.Lock(), 0
    # For odd call numbers the process dies after the function, else before it.
    is_after = call % 2

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            is_last = calls == call
        if is_last and not is_after:
            die()
        result = function(*arguments, **options)
        if is_last:
            die()
        return result

    setattr(owner, name, deadly)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def config(run: Path) -> dict[str, Any]:
    """A config with deferred updates, a loss scale, and arrays on two tiers."""
    return {
        "execution": "streamed",
        "memory": {"nvme": [str(run / "nvme")]},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme"},
        },
        "fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 7},
        "gradient_clipping": 1.0,
        "persistence_threshold": 1,
    }


def init() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) * 0.4 for i, k in enumerate(keys)
    }


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    x = batch["x"].astype(params["w0"].dtype)
    for i in range(4):
        x = jnp.tanh(x @ params[f"w{i}"])
        x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["y"]))


def data() -> grain.IterDataset:
    draw = np.random.default_rng(0).standard_normal
    rows = draw((64, WIDTH)).astype(np.float32)
    samples = [{"x": row, "y": np.sin(row)} for row in rows]
    source = grain.MapDataset.source(samples).shuffle(3).repeat(None)
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return source.to_iter_dataset(reading).batch(BATCH, drop_remainder=True)


if __name__ == "__main__":
    main()
