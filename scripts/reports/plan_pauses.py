"""Trains with sequences that get longer, and prints how long steps waited for plans.

    python scripts/reports/plan_pauses.py [--buckets 6] [--grown 60] [--streamed]
        [--output runs/plan_pauses]

A GPT (3.3M parameters by default) trains on the source of Python's standard library
with sequence-length warm-up: `--buckets` lengths, over the first `--grown` of `--steps`
steps. Plans of all lengths are made in a thread while steps run. A row is a length: the
step in which it comes first, how long that step waited for its plan, the median time of
its other steps, and the longest of them, which shares the processor with the thread.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import zinf
from zinf.cli.task import task_of
from zinf.core.trainer import Trainer
from zinf.data import describe


def config_of(asked: argparse.Namespace) -> zinf.Config:
    longest = asked.sequence_length
    step = longest // asked.buckets
    return zinf.Config.load(
        {
            "model": {
                "num_layers": asked.num_layers,
                "num_heads": 4,
                "embed_dim": 256,
                "max_length": longest,
            },
            "data": {"sequence_length": longest, "max_buckets": asked.buckets},
            "train_batch_size": asked.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "run": {"steps": asked.steps},
            "execution": "streamed" if asked.streamed else "auto",
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": step,
                "max_difficulty": longest,
                "schedule_type": "fixed_linear",
                "schedule_config": {
                    "total_curriculum_step": asked.grown,
                    "difficulty_step": step,
                },
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--steps", type=int, default=72)
    parser.add_argument("--grown", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/plan_pauses"))
    asked = parser.parse_args()
    zinf.tune_malloc()
    config = config_of(asked)
    shutil.rmtree(asked.output, ignore_errors=True)
    asked.output.mkdir(parents=True)
    file = asked.output / "metrics.jsonl"
    arguments, named = task_of(config).arguments()
    with zinf.initialize(*arguments, **named) as engine:
        data = task_of(config).dataset("train")
        run = {"steps": asked.steps, "metrics": file, "log_every": asked.steps}
        Trainer(engine, data, describe=describe, **run).run()
    show([json.loads(line) for line in file.read_text().splitlines()])


def show(lines: list[dict]) -> None:
    """Print a row for each length."""
    table = Table("length", "first step", "waited", "median step", "longest", box=None)
    waits = []
    for length in dict.fromkeys(line["sequence_length"] for line in lines):
        first, *rest = [x for x in lines if x["sequence_length"] == length]
        times = [x["step_seconds"] - x["plan_seconds"] for x in rest]
        waits.append(first["plan_seconds"])
        parts = (first["plan_seconds"], median(times), max(times))
        seconds = [f"{part:.3f} s" for part in parts]
        table.add_row(str(length), str(first["step"]), *seconds)
    Console(width=100).print(table)
    longest = max(waits[1:], default=0.0)
    print(f"{len(waits)} plans; longest wait after the first step: {longest:.3f} s")


if __name__ == "__main__":
    main()
