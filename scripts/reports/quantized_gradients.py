"""Loss curves with gradients exchanged as they are, as 4-bit integers, and with LoCo.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        python scripts/reports/quantized_gradients.py --steps 300

A GPT of 3.3M parameters learns Python's standard library by bytes on 8 devices: two
nodes of four, so that gradients are quantized twice. For each way the mean loss of the
last 50 steps, and what it is over that of the first way.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import zinf
from zinf.models import GPT, GPTConfig, next_token_loss

SHAPE = GPTConfig(num_layers=4, num_heads=4, embed_dim=256, max_length=64)
LAST_STEPS, BYTES = 50, 4_000_000
QGZ = {"zero_quantized_gradients": True}
WAYS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "4 bits": QGZ,
    "4 bits, LoCo": QGZ | {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
}


def text() -> np.ndarray:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(content[:BYTES], np.uint8)


def losses(zero: dict[str, Any], num_steps: int, batch: int, seed: int) -> list[float]:
    config = {
        "execution": "fused",
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, **zero},
        "gradient_clipping": 1.0,
        "persistence_threshold": 1,
    }
    random, content, length = np.random.default_rng(seed), text(), SHAPE.max_length
    engine = zinf.nnx.initialize(
        next_token_loss,
        lambda: GPT(SHAPE, rngs=nnx.Rngs(seed)),
        optax.adamw(optax.warmup_constant_schedule(0.0, 1e-3, 30)),
        config,
    )
    found = []
    with engine:
        for _ in range(num_steps):
            starts = random.integers(0, len(content) - length - 1, batch)
            tokens = np.stack([content[i : i + length + 1] for i in starts])
            found.append(engine.step({"tokens": tokens.astype(np.int32)})["loss"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.device_count()} devices")
    first = None
    for name, zero in WAYS.items():
        curve = losses(zero, asked.steps, asked.batch, asked.seed)
        last = float(np.mean(curve[-LAST_STEPS:]))
        first = first or last
        every = np.array_split(curve, asked.steps // LAST_STEPS or 1)
        means = " ".join(f"{np.mean(part):.4f}" for part in every)
        print(f"{name}: {means}; {100 * (last / first - 1):+.2f}%", flush=True)


if __name__ == "__main__":
    main()
