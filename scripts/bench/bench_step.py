"""Compares the streamed step with the fused step of the same model, all in memory.

    python scripts/bench/bench_step.py [--num-layers 8] [--embed-dim 512]
        [--tokens 1024] [--rounds 15] [--leave-malloc]
        [--beside TREE --contender "fused, remat"]

Both keep all state on the device and do the same arithmetic: the fused step recomputes
each block in the backward pass (`remat`), as segments do. A second pair is the fused
step without remat, and the streamed step whose segments keep residuals. Each contender
runs in its own process, as in normal use; in one process they would share a heap. Its
malloc is set as the command `zinf` does, unless --leave-malloc is given. They take
turns, each streamed step next to the fused step that it is compared with. The
losses of the first and the last step must agree. Seconds are medians and ranges. Ratios
are taken within a round, then their median and quartiles: on a shared machine seconds
drift by more than the steps differ. With --beside, one contender of this tree takes
turns with that of another tree of zinf, such as a `git worktree` of an older commit.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from served import Served, answer

import zinf
from zinf.models import GPTConfig, init_and_loss

FUSED, STREAMED = "fused, remat", "streamed, remat"
NO_REMAT, KEEPING = "fused, no remat", "streamed, residuals kept"
PAIRS = [(STREAMED, FUSED), (KEEPING, NO_REMAT)]
ROOT = Path(__file__).resolve().parents[2]
SIZES = ("num_layers", "embed_dim", "vocabulary", "length", "tokens")


def main() -> None:
    options = _parse()
    if options.serve:
        _serve(options)
        return
    if options.beside is not None:
        _compare_trees(options)
        return
    command = [sys.executable, *sys.argv, "--serve"]
    names = FUSED, STREAMED, KEEPING, NO_REMAT
    engines = {name: Served([*command, name]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(options.rounds + 2):
        pairs = random.sample(PAIRS, len(PAIRS))
        for name in [n for pair in pairs for n in random.sample(pair, len(pair))]:
            took, loss = engines[name].ask()
            if number > 1:  # The first two steps compile and fault in memory.
                seconds[name].append(took)
            losses[name].append(loss)
    over = {name: _ratios(seconds[name], seconds[FUSED]) for name in engines}
    same = {name: _ratios(seconds[name], seconds[fused]) for name, fused in PAIRS}
    columns = "step", "seconds", "over fused, remat", "over fused, the same"
    table = Table(*columns, "first loss", "last loss", box=None)
    for name, found in seconds.items():
        table.add_row(
            name,
            f"{median(found):.3f} ({min(found):.3f}-{max(found):.3f})",
            over[name],
            same.get(name, ""),
            f"{losses[name][0]:.6f}",
            f"{losses[name][-1]:.6f}",
        )
    Console(width=120, highlight=False).print(table)
    for engine in engines.values():
        engine.close()


def _compare_trees(options: argparse.Namespace) -> None:
    """Prints the seconds of a contender in both trees, and their ratio."""
    arguments = [
        x for n in SIZES for x in (f"--{n.replace('_', '-')}", str(getattr(options, n)))
    ]
    engines = {}
    for tree in (ROOT, options.beside):
        file = tree / "scripts" / "bench" / Path(__file__).name
        command = [sys.executable, file, *arguments, "--serve", options.contender]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        engines[tree] = Served(command, environment)
    seconds: dict[Path, list[float]] = {tree: [] for tree in engines}
    losses: dict[Path, list[float]] = {tree: [] for tree in engines}
    for number in range(options.rounds + 1):
        for tree in random.sample(list(engines), len(engines)):
            took, loss = engines[tree].ask()
            if number:  # The first step compiles.
                seconds[tree].append(took)
            losses[tree].append(loss)
    for tree, found in seconds.items():
        print(
            f"{tree}: {median(found):.2f} s ({min(found):.2f}-{max(found):.2f}), "
            f"losses {losses[tree][0]:.6f} to {losses[tree][-1]:.6f}"
        )
        engines[tree].close()
    here, there = seconds.values()
    print(f"here over there: {_ratios(here, there)}")


def _serve(options: argparse.Namespace) -> None:
    if not options.leave_malloc:
        zinf.tune_malloc()
    execution = "streamed" if options.serve in (STREAMED, KEEPING) else "fused"
    remat = options.serve in (STREAMED, FUSED)
    engine = _engine(options, execution=execution, remat=remat)
    rng = np.random.default_rng(0)
    shape = options.tokens // options.length, options.length + 1
    batch = {"tokens": rng.integers(0, options.vocabulary, shape, np.int32)}
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = engine.step(batch)["loss"]
        answer([time.perf_counter() - began, loss])
    engine.close()


def _ratios(found: list[float], beside: list[float]) -> str:
    low, middle, high = quantiles(
        [a / b for a, b in zip(found, beside, strict=True)], n=4
    )
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def _engine(options: argparse.Namespace, *, execution: str, remat: bool) -> zinf.Engine:
    is_streamed = execution == "streamed"
    model = GPTConfig(
        num_layers=options.num_layers,
        num_heads=options.embed_dim // 64,
        embed_dim=options.embed_dim,
        vocab_size=options.vocabulary,
        max_length=options.length,
        remat=remat and not is_streamed,
    )
    init, loss = init_and_loss(model, seed=0)
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    config = {"execution": execution}
    if is_streamed:
        config["segment"] = {"remat": "always" if remat else "auto"}
    return zinf.initialize(loss, init, tx, config)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--leave-malloc", action="store_true", help="do not set zinf's malloc"
    )
    parser.add_argument("--beside", type=Path, help="another tree of zinf")
    parser.add_argument(
        "--contender", default=FUSED, choices=[FUSED, NO_REMAT, STREAMED, KEEPING]
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
