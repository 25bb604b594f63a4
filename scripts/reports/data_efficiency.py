"""Trains with and without data efficiency, and prints loss over tokens and seconds.

    nice python scripts/reports/data_efficiency.py [--data stdlib] [--steps 600]
        [--seeds 3] [--lr 3e-3] [--batch 16] [--output runs/data_efficiency]
    python scripts/reports/data_efficiency.py --show [--output runs/data_efficiency]

Four ways to train a GPT (3.3M parameters by default) on the bytes of the files in a
folder, by default the source of Python's standard library: as usual; with
sequence-length warm-up (SLW); with random layerwise token dropping in the middle layers
(random-LTD); with both. All end after as many tokens as `--steps` whole steps have, and
their learning rates follow the tokens. Lengths grow over the first `--share` of the
steps, kept tokens over twice as many.

Each run is one line of OUTPUT/runs.jsonl. A run with the same settings that has a line
is not done again, so the command may be stopped and repeated; `--show` prints what is
there, a table for each set of settings.

A row is the median over seeds, with the range: the validation loss at quarters of the
tokens, and at quarters of the seconds that the baseline takes (a way that ends before
has its last loss); the tokens in layers over the baseline's; seconds of
processor time in steps, with all plans made before; and the worst loss ratio, which
is the largest training loss over the lowest one before it (arXiv 2108.06084, section 3:
above 1.5 is a spike), with the number of such steps, and the largest training loss,
which is that of the first steps (5.5) if none is worse. Short batches are noisy, so the
ratio of SLW has some noise that is no spike. "inf": the loss was not finite. With a
high --lr, see whether the baseline diverges and SLW does not.
"""

import argparse
import math
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from loss_curves import cell, losses_at, run_and_show
from rich.console import Console
from rich.table import Table

import zinf
from zinf.cli.task import task_of
from zinf.core.optim.decision import NonFiniteError
from zinf.data import PacedIterator, describe

WAYS = ("baseline", "SLW", "random-LTD", "both")
SPIKE = 1.5  # of the loss ratio; SLW's paper, section 3
NUM_POINTS = 8  # evaluations of a run, evenly over its tokens
# What two runs must have in common to be rows of one table.
SETTINGS = (
    *("data", "steps", "lr", "batch", "share", "clipping", "warmup"),
    *("sequence_length", "num_layers", "num_heads", "embed_dim", "max_buckets"),
)


def config_of(way: str, seed: int, asked: argparse.Namespace) -> zinf.Config:
    """The config of one run."""
    length, grown = asked.sequence_length, max(1, round(asked.share * asked.steps))
    layers = list(range(1, asked.num_layers - 1))
    step = max(1, length // 8)
    curriculum = {
        "enabled": way in ("SLW", "both"),
        "curriculum_type": "seqlen",
        "min_difficulty": step,
        "max_difficulty": length,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": grown, "difficulty_step": step},
    }
    kept = {
        "min_value": max(step, length // 4),
        "max_value": length,
        "schedule_type": "fixed_linear",
        # Twice as long as lengths grow: kept tokens that grow as fast as the length
        # would never be fewer, and nothing would be dropped with both.
        "schedule_config": {"require_steps": 2 * grown, "seq_per_step": step},
    }
    random_ltd = {
        "enabled": way in ("random-LTD", "both"),
        "random_ltd_layer_id": layers,
        "random_ltd_schedule": kept,
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    efficiency = {"enabled": True, "data_routing": routing}
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
                "max_length": length,
            },
            "data": {
                "sequence_length": length,
                "seed": seed,
                "max_buckets": asked.max_buckets,
                "paths": asked.data if asked.data == "stdlib" else [asked.data],
            },
            "train_batch_size": asked.batch,
            "gradient_clipping": asked.clipping,
            "optimizer": {"type": "AdamW", "params": {"lr": asked.lr}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": schedule,
                "count": "tokens" if way in ("SLW", "both") else "steps",
            },
            # SLW takes more steps for as many tokens: at most twice as many, as the
            # sequences of its first steps are half as long on average.
            "run": {"steps": 3 * asked.steps, "seed": seed},
            "curriculum_learning": curriculum,
            "data_efficiency": efficiency,
        }
    )


def trained(way: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Losses of one run, until it has seen as many tokens as the baseline."""
    config = config_of(way, seed, asked)
    budget = asked.steps * asked.batch * asked.sequence_length
    arguments, named = task_of(config).arguments()
    batches = iter(task_of(config).dataset("train"))
    validation = task_of(config).dataset("validation")
    losses: list[float] = []
    curve: list[tuple[int, float, float]] = []
    tokens, layer_tokens, seconds = 0, 0.0, 0.0
    dropping = config.kept_tokens
    share = 0.0 if dropping is None else len(dropping.layers) / asked.num_layers
    with zinf.initialize(*arguments, **named) as engine:

        def loss_of_validation() -> float:
            found = zip(range(asked.validation_batches), validation, strict=False)
            taken = [engine.evaluate(batch) for _, batch in found]
            return sum(taken) / len(taken)

        batch = next(batches)
        if isinstance(batches, PacedIterator):
            # Before, not beside the steps, whose processor time is measured.
            for shapes in batches.coming(config.run.steps):
                engine.prepare(shapes)
        engine.prepare(batch)
        is_finite = True
        while tokens < budget and is_finite:
            begun = process_time()
            try:
                losses.append(engine.step(batch)["loss"])
            except NonFiniteError:
                losses.append(math.inf)
                is_finite = False
            found = describe(batch)
            batch = next(batches)
            seconds += process_time() - begun
            tokens += found["tokens"]
            few = found["kept_tokens"] / found["sequence_length"]
            layer_tokens += found["tokens"] * (1 - share + share * few)
            if is_finite and tokens * NUM_POINTS >= budget * (len(curve) + 1):
                curve.append((tokens, seconds, loss_of_validation()))
        if not is_finite:
            curve.append((tokens, seconds, math.inf))
    return {
        **{key: getattr(asked, key) for key in SETTINGS},
        "way": way,
        "seed": seed,
        "parameters": task_of(config).num_parameters,
        "layer_tokens": layer_tokens / budget,
        "curve": curve,
        "losses": losses,
    }


def ratios(losses: list[float]) -> list[float]:
    """Each loss over the lowest one before it."""
    lowest = np.minimum.accumulate(losses)[:-1]
    return [float(r) for r in np.asarray(losses[1:]) / lowest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=256)
    parser.add_argument("--max-buckets", type=int, default=4)
    parser.add_argument("--validation-batches", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/data_efficiency"))
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    run_and_show(asked, SETTINGS, trained, show)


def show(found: list[dict[str, Any]]) -> None:
    """Print the table of runs with the same settings."""
    settings = ", ".join(f"{key} {found[0][key]}" for key in SETTINGS)
    parts = ("1/4", "1/2", "3/4")
    table = Table(
        "way",
        "seeds",
        *(f"loss at {part}" for part in parts),
        "at the end",
        *(f"at {part} s" for part in parts),
        "at all s",
        *("steps", "in layers", "seconds", "worst ratio", "spikes", "largest"),
        title=f"{found[0]['parameters']:,} parameters; {settings}",
        box=None,
    )
    budget = found[0]["steps"] * found[0]["batch"] * found[0]["sequence_length"]
    times = [run["curve"][-1][1] for run in found if run["way"] == "baseline"]
    total = median(times) if times else math.nan
    for way in WAYS:
        runs = [run for run in found if run["way"] == way]
        if not runs:
            continue
        rows = [ratios(run["losses"]) for run in runs]
        table.add_row(
            way,
            str(len(runs)),
            *losses_at(runs, 0, budget),
            *losses_at(runs, 1, total),
            cell([len(run["losses"]) for run in runs], 0),
            cell([run["layer_tokens"] for run in runs], 2),
            cell([run["curve"][-1][1] for run in runs], 0),
            cell([max(row, default=1.0) for row in rows], 2),
            cell([sum(r > SPIKE for r in row) for row in rows], 0),
            cell([max(run["losses"]) for run in runs], 2),
        )
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
