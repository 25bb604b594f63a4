"""Finished runs of `zinf train` that tests only read, each made at most once a session.

A test that needs a trained model, a checkpoint, metrics or a timeline reads one of
these. A test that writes copies what it needs first.
"""

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.tiers import stage_3
from zinf.cli.train import train_config
from zinf.core.machine.rates_file import save_rates
from zinf.core.plan import Rates
from zinf.distributed import Alone

STEPS = 8
TIERS: dict[str, dict[str, Any]] = {
    "nvme": {"zero_optimization": stage_3("nvme"), "persistence_threshold": 1},
    "host": {"zero_optimization": stage_3("cpu"), "persistence_threshold": 1},
    "fused": {"execution": "fused"},
}


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended.

    Attributes:
        config: the config file that it was trained from.
        output: what the run left: metrics, report, timeline, checkpoints.
    """

    config: Path
    output: Path


@dataclass
class Runs:
    """Runs by name. Workers of one session share `folder`; a lock keeps others out.

    Attributes:
        folder: where the runs are made.
    """

    folder: Path

    @cached_property
    def nvme(self) -> TrainedRun:
        """A GPT that trains in seconds on all three tiers, and keeps residuals."""
        return self.made("nvme", train_small)

    @cached_property
    def host(self) -> TrainedRun:
        """The same with parameters and optimizer state on the host."""
        return self.made("host", train_small)

    @cached_property
    def fused(self) -> TrainedRun:
        """The same as one fused step."""
        return self.made("fused", train_small)

    def made(self, name: str, make: Callable[[Path, str], TrainedRun]) -> TrainedRun:
        """What `make(folder, name)` left, called once among all workers."""
        folder, done = self.folder / name, self.folder / f"{name}.done"
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                run = make(folder, name)
                done.write_text(f"{run.config}\n{run.output}\n")
        return TrainedRun(*map(Path, done.read_text().splitlines()))


def train_small(folder: Path, name: str) -> TrainedRun:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(small_config(folder, name)))
    train_config(path, [], None, 3, Alone())
    return TrainedRun(path, folder / "run")


def small_config(folder: Path, tier: str) -> dict[str, Any]:
    """The config of a small run below `folder`, with the text that it trains on."""
    letters = np.random.default_rng(0).integers(97, 105, 8000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    # Of a slow device: keeping residuals pays, small as the model is.
    save_rates(Rates(flops_per_second=1e8), folder / "rates.json", "made up")
    return {
        "rates": str(folder / "rates.json"),
        "model": {"num_layers": 2, "num_heads": 2, "embed_dim": 32, "max_length": 16},
        "data": {"paths": [str(folder / "text.txt")], "sequence_length": 16},
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "memory": {
            "device": "16MiB",
            "host": "32MiB",
            "nvme": [str(folder / "nvme")],
            "nvme_capacity": "64MiB",
        },
        "run": {
            "steps": STEPS,
            "output": str(folder / "run"),
            "evaluate_every": 4,
            "evaluate_batches": 2,
            "checkpoint_every": 4,
        },
    } | TIERS[tier]
