"""Records what DeepSpeed's data efficiency library computes: the fixtures of our tests.

    git clone --depth 1 https://github.com/deepspeedai/DeepSpeed
    python scripts/reports/record_deepspeed_data.py DeepSpeed tests/unit/data/deepspeed

Needs numpy and torch, not an installed deepspeed: only the modules of its data pipeline
are imported, and stand-ins take the place of its logger, accelerator and communication.
Recorded are the difficulty at each step, the tokens kept by random-LTD, the samples
eligible at each step (the union of the clusters of its sampler), and the index files of
its analyzer.
"""

import argparse
import json
import logging
import sys
import tempfile
import types
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {
        "min_difficulty": 8,
        "max_difficulty": 256,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 90, "difficulty_step": 8},
    },
    "linear, ends off the grid": {
        "min_difficulty": 10,
        "max_difficulty": 99,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 8},
    },
    "square root": {
        "min_difficulty": 1,
        "max_difficulty": 100,
        "schedule_type": "fixed_root",
        "schedule_config": {
            "total_curriculum_step": 110,
            "difficulty_step": 1,
            "root_degree": 2,
        },
    },
    "cube root": {
        "min_difficulty": 64,
        "max_difficulty": 1024,
        "schedule_type": "fixed_root",
        "schedule_config": {
            "total_curriculum_step": 125,
            "difficulty_step": 16,
            "root_degree": 3,
        },
    },
    "discrete": {
        "min_difficulty": 1,
        "max_difficulty": 3,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
    },
    "discrete, stays at the maximum": {
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [2, 4, 3, 9], "max_step": [3, 6, 12]},
    },
}
KEPT = {
    "a multiple": (128, 2048, 16, 1000),
    "ends off the grid": (30, 100, 8, 63),
    "no growth": (64, 64, 16, 10),
}
SAMPLES, BATCH, STEPS = 260, 4, 24


def stand_ins(folder: Path) -> None:
    """Makes DeepSpeed's modules importable one by one, without its packages' code."""
    for name in ("", ".runtime", ".runtime.data_pipeline"):
        module = types.ModuleType(f"deepspeed{name}")
        path = folder.joinpath("deepspeed", *name.split(".")[1:])
        module.__path__ = [str(path)]
        sys.modules[module.__name__] = module
    quiet = logging.getLogger("deepspeed")
    quiet.setLevel(logging.CRITICAL)
    named: dict[str, dict[str, Any]] = {
        "utils": {"logger": quiet},
        "comm": {"barrier": lambda group: None, "broadcast": lambda *a, **k: None},
        "accelerator": {"get_accelerator": Accelerator},
    }
    for name, content in named.items():
        module = types.ModuleType(f"deepspeed.{name}")
        vars(module).update(content)
        sys.modules[module.__name__] = module
        setattr(sys.modules["deepspeed"], name.partition(".")[0], module)


class Accelerator:
    """The CPU."""

    def current_device_name(self) -> str:
        return "cpu"


class Group:
    """One process."""

    def size(self) -> int:
        return 1


def changes(values: list[int]) -> list[list[int]]:
    """[value, how often] of each run of equal values."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def schedules() -> list[dict[str, Any]]:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    found = []
    for name, config in SCHEDULES.items():
        scheduler = CurriculumScheduler(config)
        values = [scheduler.update_difficulty(step) for step in range(1, 161)]
        found.append({"name": name, "config": config, "values": changes(values)})
    return found


def kept() -> list[dict[str, Any]]:
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import (
        RandomLTDScheduler,
    )

    found = []
    for name, (low, high, per_step, steps) in KEPT.items():
        schedule = {
            "min_value": low,
            "max_value": high,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": steps, "seq_per_step": per_step},
        }
        scheduler = RandomLTDScheduler(
            {
                "total_layer_num": 12,
                "random_ltd_layer_num": 10,
                "random_ltd_schedule": schedule,
                "global_batch_size": 4,
                "layer_token_lr_schedule": {"enabled": False},
            }
        )
        values, layer_tokens = [], []
        for step in range(2 * steps):
            scheduler.update_seq(step)
            values.append(scheduler.get_current_seq())
            layer_tokens.append(scheduler.state["consumed_layer_tokens"])
        found.append(
            {
                "name": name,
                "config": schedule,
                "values": changes(values),
                "layer_tokens": layer_tokens[-1],
            }
        )
    return found


def write_indexes(output: Path) -> dict[str, list[int]]:
    """The index files of two metrics, by DeepSpeed's analyzer."""
    import torch
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    draw = np.random.default_rng(3)
    metrics = {
        "length": draw.integers(4, 40, SAMPLES).tolist(),
        "rarity": draw.integers(0, 500, SAMPLES).tolist(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, values in metrics.items():
            analyzer = DataAnalyzer(
                list(range(SAMPLES)),
                num_threads=2,
                num_threads_reduce=2,
                batch_size=7,
                metric_names=[name],
                metric_functions=[
                    lambda ids, of=values: torch.tensor([of[i] for i in ids])
                ],
                metric_types=["single_value_per_sample"],
                metric_dtypes=[torch.int64],
                save_path=scratch,
            )
            analyzer.run_map()
            analyzer.run_reduce()
            for kind in ("index_to_sample", "index_to_metric", "sample_to_metric"):
                for suffix in ("bin", "idx"):
                    file = Path(scratch) / name / f"{name}_{kind}.{suffix}"
                    (output / file.name).write_bytes(file.read_bytes())
    return metrics


def samplers(output: Path) -> list[dict[str, Any]]:
    """The eligible samples of each step, for several curricula of the two metrics."""

    def metric(name: str, kind: str, low: int, high: int, **more: Any) -> dict:
        schedule = {
            "index_to_sample_path": str(output / f"{name}_index_to_sample"),
            "index_to_metric_path": str(output / f"{name}_index_to_metric"),
            "difficulty_type": kind,
            "clustering_type": "schedule_based",
            "min_difficulty": low,
            "max_difficulty": high,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 1},
        }
        return schedule | more

    root = {
        "schedule_type": "fixed_root",
        "schedule_config": {
            "total_curriculum_step": 18,
            "difficulty_step": 5,
            "root_degree": 2,
        },
    }
    cases = {
        "value": {"length": metric("length", "value", 9, 39)},
        "percentile": {"rarity": metric("rarity", "percentile", 10, 100, **root)},
        "two metrics": {
            "length": metric("length", "value", 20, 39),
            "rarity": metric("rarity", "percentile", 50, 100, **root),
        },
        "a length beside a metric": {
            "seqlen_truncate": metric(
                "length", "value", 8, 32, clustering_type="single_cluster"
            ),
            "rarity": metric("rarity", "value", 100, 500, **root),
        },
    }
    return [
        {"name": name, "metrics": bare(metrics), "eligible": eligible(metrics)}
        for name, metrics in cases.items()
    ]


def bare(metrics: dict[str, dict]) -> dict[str, dict]:
    """The metrics with file names in place of paths."""
    paths = ("index_to_sample_path", "index_to_metric_path")
    return {
        name: {k: Path(v).name if k in paths else v for k, v in metric.items()}
        for name, metric in metrics.items()
    }


def eligible(metrics: dict[str, dict]) -> list[list[Any]]:
    """[the samples that become eligible, for how many steps no others do]."""
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import (
        DeepSpeedDataSampler,
    )

    with tempfile.TemporaryDirectory() as clusters:
        curriculum = {
            "enabled": True,
            "data_cluster_path": clusters,
            "curriculum_metrics": metrics,
        }
        config = {
            "seed": 1234,
            "data_sampling": {"num_epochs": 1000, "curriculum_learning": curriculum},
        }
        sampler = DeepSpeedDataSampler(
            config, SAMPLES, BATCH, 0, 1, Group(), gradient_accumulation_steps=1,
            global_rank=0,
        )  # fmt: skip
        found = []
        for _ in range(STEPS):
            sampler.get_next_global_batch()
            now = {int(i) for cluster in sampler.data_clusters for i in cluster[0]}
            assert set(sampler.batch) <= now
            found.append(sorted(now))
        del sampler
    runs = [(ids, len(list(same))) for ids, same in groupby(found)]
    before = [[], *[ids for ids, _ in runs]]
    return [
        [sorted({*ids} - {*known}), count]
        for known, (ids, count) in zip(before, runs, strict=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deepspeed", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("output", type=Path, help="folder of the fixtures")
    asked = parser.parse_args()
    stand_ins(asked.deepspeed)
    asked.output.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):
        record = {
            "version": (asked.deepspeed / "version.txt").read_text().strip(),
            "schedules": schedules(),
            "kept": kept(),
            "metrics": write_indexes(asked.output),
            "samplers": samplers(asked.output),
        }
    text = json.dumps(record, separators=(",", ":"))
    (asked.output / "record.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
