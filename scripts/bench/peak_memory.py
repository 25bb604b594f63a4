"""Trains a byte-level GPT on the NVMe tier and prints the process's peak memory.

Run it in a process of its own: what it reports is the most anonymous memory since the
process began (`anonymous_memory.py`), with what the interpreter, jax and the compiler
take.

    python scripts/bench/peak_memory.py --num-layers 24 --embed-dim 1024 --mlp-dim 5120

With --tune-malloc malloc is set as the command `zinf` sets it (`zinf.tune_malloc`).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from anonymous_memory import MemoryPeak

import zinf
from zinf.models import GPTConfig, init_and_loss, num_parameters


def main() -> None:
    options = _parse()
    if options.tune_malloc:
        zinf.tune_malloc()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zinf-peak-") as folder:
        print(json.dumps(measure(options, Path(folder))), flush=True)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains for some steps; returns sizes in bytes and times in seconds."""
    model = GPTConfig(
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        embed_dim=options.embed_dim,
        mlp_dim=options.mlp_dim,
        max_length=options.sequence_length,
    )
    init, loss = init_and_loss(model, seed=0)
    peak = MemoryPeak()
    # What python, jax, flax and the rest take before anything is trained.
    imported_bytes = peak.nbytes()
    start = time.perf_counter()
    batch = tokens(options, seed=0)
    engine = zinf.initialize(
        loss, init, optax.adamw(1e-4), config=_config(options, folder), batch=batch
    )
    init_seconds = time.perf_counter() - start
    init_bytes = peak.nbytes()
    losses, step_seconds = [], []
    for step in range(options.steps):
        metrics = engine.step(tokens(options, seed=step))
        losses.append(metrics["loss"])
        step_seconds.append(metrics["step_seconds"])
    engine.close()
    peak.stop()
    return {
        "num_layers": options.num_layers,
        "num_parameters": num_parameters(model),
        "losses": losses,
        "init_seconds": init_seconds,
        "step_seconds": step_seconds,
        "imported_bytes": imported_bytes,
        "init_bytes": init_bytes,
        "peak_bytes": peak.nbytes(),
        "device_bytes": metrics["device_bytes"],
        "host_bytes": metrics["host_bytes"],
        "nvme_bytes": metrics["nvme_bytes"],
    }


def tokens(options: argparse.Namespace, *, seed: int) -> dict[str, np.ndarray]:
    shape = options.batch_size, options.sequence_length + 1
    return {"tokens": np.random.default_rng(seed).integers(0, 256, shape, np.int32)}


def _config(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    nvme = {"device": "nvme"}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme,
            "offload_optimizer": nvme,
        },
        "gradient_clipping": options.gradient_clipping,
        "memory": {
            "device": options.device,
            "host": options.host,
            "nvme": [str(folder / "nvme")],
        },
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--embed-dim", type=int, default=1024)
    parser.add_argument("--mlp-dim", type=int, default=None)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="512MiB", help="budget of the device tier")
    parser.add_argument("--host", default="512MiB", help="budget of the host tier")
    parser.add_argument(
        "--gradient-clipping", type=float, default=0.0, help="norm; 0 is no clipping"
    )
    parser.add_argument(
        "--folder", default=None, help="where the NVMe tier goes (a temporary folder)"
    )
    parser.add_argument("--tune-malloc", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
