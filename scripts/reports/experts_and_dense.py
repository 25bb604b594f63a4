"""Trains a GPT with and without experts, and prints loss over steps and seconds.

    nice python scripts/reports/experts_and_dense.py [--data stdlib] [--steps 450]
        [--seeds 3] [--lr 3e-3] [--batch 16] [--output runs/experts_and_dense]
    python scripts/reports/experts_and_dense.py --show [--output runs/experts_and_dense]

Three ways to train on the bytes of the files in a folder, by default the source of
Python's standard library: dense; with 8 experts in place of every MLP; with 32 in
place of every second one. A token passes one expert, which has the size of the MLP, and
no token is dropped, so a token takes as many flops in all three (beside the router's).

Each run is one line of OUTPUT/runs.jsonl. A run with the same settings that has a line
is not done again, so the command may be stopped and repeated; `--show` prints what is
there, a table for each set of settings.

A row is the median over seeds, with the range: the validation loss (cross entropy
alone) at quarters of the steps, and at quarters of the seconds that the dense model
takes, interpolated between evaluations (a way that ends before has its last loss); and
seconds of processor time in steps, without tracing and compiling.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from loss_curves import cell, losses_at, run_and_show
from rich.console import Console
from rich.table import Table

import zinf
from zinf.cli.gpt_task import gpt_config
from zinf.cli.task import task_of
from zinf.models import flops_per_token, init_and_loss, num_parameters

DENSE = "dense"
# Experts in place of each block's MLP, in turns.
WAYS = {DENSE: (0,), "8 experts": (8,), "32, every second": (0, 32)}
NUM_POINTS = 8  # evaluations of a run, evenly over its steps
# What two runs must have in common to be rows of one table.
SETTINGS = (
    *("data", "steps", "lr", "batch", "warmup", "balance"),
    *("sequence_length", "num_layers", "num_heads", "embed_dim"),
)


def config_of(way: str, seed: int, asked: argparse.Namespace) -> zinf.Config:
    """The config of one run."""
    turns = WAYS[way]
    schedule = {
        "warmup_num_steps": max(2, round(asked.warmup * asked.steps)),
        "total_num_steps": asked.steps,
        "cos_min_ratio": 0.1,
    }
    return zinf.Config.load(
        {
            "model": {
                "num_layers": asked.num_layers,
                "num_heads": asked.num_heads,
                "embed_dim": asked.embed_dim,
                "max_length": asked.sequence_length,
                "num_experts": [turns[i % len(turns)] for i in range(asked.num_layers)],
                "aux_loss_coefficient": asked.balance,
            },
            "data": {
                "sequence_length": asked.sequence_length,
                "seed": seed,
                "paths": asked.data if asked.data == "stdlib" else [asked.data],
            },
            "train_batch_size": asked.batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": asked.lr}},
            "scheduler": {"type": "WarmupCosineLR", "params": schedule},
            "run": {"steps": asked.steps, "seed": seed},
        }
    )


def trained(way: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Losses of one run."""
    config = config_of(way, seed, asked)
    model = gpt_config(config)
    (loss, init, optimizer, told), named = task_of(config).arguments()
    # The balance of experts is no part of what models are compared by.
    _, entropy = init_and_loss(replace(model, aux_loss_coefficient=0.0), seed=seed)
    batches = iter(task_of(config).dataset("train"))
    validation = task_of(config).dataset("validation")
    curve: list[tuple[int, float, float]] = []
    seconds = 0.0
    with zinf.initialize(
        loss, init, optimizer, told, **named, eval_loss_fn=entropy
    ) as engine:
        batch = next(batches)
        engine.prepare(batch)
        for step in range(1, asked.steps + 1):
            begun = process_time()
            engine.step(batch)
            batch = next(batches)
            # The first step compiles.
            seconds += process_time() - begun if step > 1 else 0
            if step * NUM_POINTS >= asked.steps * (len(curve) + 1):
                held_out = zip(
                    range(asked.validation_batches), validation, strict=False
                )
                losses = [engine.evaluate(x) for _, x in held_out]
                curve.append((step, seconds, sum(losses) / len(losses)))
    return {
        **{key: getattr(asked, key) for key in SETTINGS},
        "way": way,
        "seed": seed,
        "parameters": num_parameters(model),
        "flops_per_token": flops_per_token(model),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=float, default=0.05)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=256)
    parser.add_argument("--validation-batches", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("runs/experts_and_dense"))
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    run_and_show(asked, SETTINGS, trained, show)


def show(found: list[dict[str, Any]]) -> None:
    """Print the table of runs with the same settings."""
    parts = ("1/4", "1/2", "3/4")
    table = Table(
        *("way", "seeds", "parameters", "MFLOP a token"),
        *(f"loss at {part}" for part in parts),
        "at the end",
        *(f"at {part} s" for part in parts),
        *("at all s", "seconds"),
        title=", ".join(f"{key} {found[0][key]}" for key in SETTINGS),
        box=None,
    )
    steps = found[0]["steps"]
    times = [run["curve"][-1][1] for run in found if run["way"] == DENSE]
    total = median(times) if times else math.nan
    for way in WAYS:
        runs = [run for run in found if run["way"] == way]
        if not runs:
            continue
        table.add_row(
            *(way, str(len(runs)), f"{runs[0]['parameters']:,}"),
            f"{runs[0]['flops_per_token'] / 1e6:.1f}",
            *losses_at(runs, 0, steps),
            *losses_at(runs, 1, total),
            cell([run["curve"][-1][1] for run in runs], 0),
        )
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
