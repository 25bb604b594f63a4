"""Trains with and without data efficiency, and prints loss over tokens and seconds.

    python scripts/reports/data_efficiency.py [--steps 600] [--seeds 3] [--lr 3e-3]
        [--batch 16] [--output runs/data_efficiency]

Four ways to train a GPT (3.3M parameters by default) on the source of Python's standard
library: as usual; with sequence-length warm-up (SLW); with random layerwise token
dropping in the middle layers (random-LTD); with both. All end after as many tokens as
`--steps` whole steps have, and their learning rates follow the tokens. Lengths grow
over the first `--share` of the steps, kept tokens over twice as many.

A row is the median over seeds, with the range: the validation loss at the end, and at
half of the tokens; the share of the baseline's tokens in layers; seconds of steps,
without waiting for plans; the longest of such waits after the first step; and the
worst loss ratio, which is the largest loss over the lowest one before it (arXiv
2108.06084, section 3: above 1.5 is a spike). Run with a high --lr to see whether the
baseline diverges and SLW does not. Losses of each step are in OUTPUT/losses.json.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import zinf
from zinf.cli.problem import dataset, problem
from zinf.data import PacedIterator, describe
from zinf.optim.decision import NonFiniteError

WAYS = ("baseline", "SLW", "random-LTD", "both")


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
        "warmup_num_steps": max(2, asked.steps // 20),
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
            "data": {"sequence_length": length, "seed": seed},
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
    arguments, named = problem(config)
    batches = iter(dataset(config, "train"))
    validation = dataset(config, "validation")
    losses, waits, halfway = [], [], None
    tokens, layer_tokens, seconds = 0, 0.0, 0.0
    num_layers = asked.num_layers
    dropping = config.kept_tokens
    share = len(dropping.layers) / num_layers if dropping is not None else 0.0
    with zinf.initialize(*arguments, **named) as engine:

        def loss_of_validation() -> float:
            found = zip(range(asked.validation_batches), validation, strict=False)
            taken = [engine.evaluate(batch) for _, batch in found]
            return sum(taken) / len(taken)

        batch = next(batches)
        if isinstance(batches, PacedIterator):
            engine.prepare(batch)
            for shapes in batches.coming(config.run.steps):
                engine.prepare_ahead(shapes)
        while tokens < budget:
            try:
                metrics = engine.step(batch)
            except NonFiniteError:
                losses.append(float("inf"))
                break
            losses.append(metrics["loss"])
            waits.append(metrics["plan_seconds"])
            seconds += metrics["step_seconds"] - metrics["plan_seconds"]
            found = describe(batch)
            tokens += found["tokens"]
            few = found["kept_tokens"] / found["sequence_length"]
            layer_tokens += found["tokens"] * (1 - share + share * few)
            if halfway is None and tokens >= budget / 2:
                halfway = loss_of_validation()
            batch = next(batches)
        return {
            "way": way,
            "seed": seed,
            "loss": loss_of_validation(),
            "halfway": float("inf") if halfway is None else halfway,
            "steps": len(losses),
            "tokens": tokens,
            "layer_tokens": layer_tokens / budget,
            "seconds": seconds,
            "wait": max(waits[1:], default=0.0),
            "ratio": worst_ratio(losses),
            "losses": losses,
        }


def worst_ratio(losses: list[float]) -> float:
    """The largest loss over the lowest one before it."""
    worst, lowest = 1.0, losses[0]
    for loss in losses:
        worst, lowest = max(worst, loss / lowest), min(lowest, loss)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=256)
    parser.add_argument("--validation-batches", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/data_efficiency"))
    asked = parser.parse_args()
    zinf.tune_malloc()
    found = []
    for seed in range(asked.seeds):
        for way in WAYS:
            found.append(trained(way, seed, asked))
            print(f"seed {seed}, {way}: loss {found[-1]['loss']:.4f}", flush=True)
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "losses.json").write_text(json.dumps(found))
    show(found)


def show(found: list[dict[str, Any]]) -> None:
    columns = {
        "loss": ("loss", 4),
        "at half": ("halfway", 4),
        "steps": ("steps", 0),
        "tokens": ("tokens", 0),
        "in layers": ("layer_tokens", 2),
        "seconds": ("seconds", 1),
        "longest wait": ("wait", 2),
        "worst ratio": ("ratio", 2),
    }
    table = Table("way", *columns, box=None)
    for way in WAYS:
        runs = [run for run in found if run["way"] == way]
        cells = []
        for key, digits in columns.values():
            values = [run[key] for run in runs]
            text = f"{median(values):,.{digits}f}"
            if max(values) > min(values):
                text += f" ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
            cells.append(text)
        table.add_row(way, *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
