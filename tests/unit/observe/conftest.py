"""A real run of `zinf train`, made once for all tests that look at what it wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from zinf.cli.train import train_config
from zinf.distributed import Alone
from zinf.plan import Rates
from zinf.prepare.rates_file import save_rates


@pytest.fixture(scope="session")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that trains in seconds on all three tiers, and keeps residuals."""
    folder = tmp_path_factory.mktemp("small")
    letters = np.random.default_rng(0).integers(97, 105, 8000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    # Of a slow device: keeping residuals pays, small as the model is.
    save_rates(Rates(flops_per_second=1e8), folder / "rates.json", "made up")
    config: dict[str, Any] = {
        "rates": str(folder / "rates.json"),
        "model": {"num_layers": 2, "num_heads": 2, "embed_dim": 32, "max_length": 16},
        "data": {"paths": [str(folder / "text.txt")], "sequence_length": 16},
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "memory": {
            "device": "16MiB",
            "host": "32MiB",
            "nvme": [str(folder / "nvme")],
            "nvme_capacity": "64MiB",
        },
        "persistence_threshold": 1,
        "run": {
            "steps": 8,
            "output": str(folder / "run"),
            "evaluate_every": 4,
            "evaluate_batches": 2,
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def run_folder(small_config: Path) -> Path:
    """What `zinf train` left of a run of that config."""
    folder = small_config.parent / "run"
    train_config(small_config, [], None, 3, Alone())
    return folder
