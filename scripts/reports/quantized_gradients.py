"""Loss curves with gradients exchanged as they are, in 4 bits, with LoCo; by signs.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        python scripts/reports/quantized_gradients.py --steps 300

A GPT of 3.3M parameters learns Python's standard library by bytes on 8 devices. For
qgZ they are two nodes of four, so that gradients are quantized twice. For each way the
mean losses of 50 steps, and what the last is over that of the first way of its table.

Tables: qgz; compressed (zinf.compressed of Adam, with its bias correction, by
freeze_step); onebit (DeepSpeed's OneBitAdam, without one, and its relatives). The
learning rate of the last two rises for 30 steps and then falls to zero.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import zinf
from zinf.core.optim import build_schedule
from zinf.core.optim.decision import NonFiniteError
from zinf.models import GPTConfig
from zinf.models.gpt_functions import init_and_loss

SHAPE = GPTConfig(num_layers=4, num_heads=4, embed_dim=256, max_length=64)
LAST_STEPS, BYTES = 50, 4_000_000
FREEZE = "freeze_step"  # of zinf.compressed, beside the sections of a config
Section = dict[str, Any]


def with_zero(**zero: Any) -> Section:
    """ZeRO-3 in two groups, with AdamW and clipping."""
    zero = {"stage": 3, "zero_hpz_partition_size": 4, **zero}
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"zero_optimization": zero, "gradient_clipping": 1.0, "optimizer": adam}


def with_adam(kind: str = "Adam", **params: Any) -> Section:
    """All state on every device, without clipping; the rate falls to zero."""
    optimizer = {"type": kind, "params": {"lr": 1e-3, **params}}
    return {"mesh": {"fsdp": jax.device_count()}, "optimizer": optimizer}


def tables() -> dict[str, dict[str, Section]]:
    qgz = {"zero_quantized_gradients": True}
    loco = qgz | {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    steps = (10, 50, 100, 150, 200)
    settled = {"betas": (0.9, 0.95)}
    return {
        "qgz": {
            "as they are": with_zero(),
            "4 bits": with_zero(**qgz),
            "4 bits, LoCo": with_zero(**loco),
        },
        "compressed": {
            "Adam": with_adam(),
            **{f"freeze_step {n}": with_adam() | {FREEZE: n} for n in steps},
        },
        "onebit": {
            "Adam": with_adam(),
            **{
                f"OneBitAdam, freeze_step {n}": with_adam("OneBitAdam", freeze_step=n)
                for n in steps
            },
            "the same at 100, beta2 0.95": with_adam(
                "OneBitAdam", freeze_step=100, **settled
            ),
            "ZeroOneAdam, beta2 0.95": with_adam(
                "ZeroOneAdam", var_freeze_step=100, local_step_scaler=100, **settled
            ),
            # Its defaults, the two that count steps of a run a thousand times smaller.
            "ZeroOneAdam": with_adam(
                "ZeroOneAdam", var_freeze_step=100, local_step_scaler=33
            ),
        },
    }


def text() -> np.ndarray:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(content[:BYTES], np.uint8)


def losses(way: Section, num_steps: int, batch: int, seed: int) -> list[float]:
    rate = {"warmup_num_steps": 30, "warmup_type": "linear", "warmup_max_lr": 1e-3}
    kind, params = "WarmupLR", rate
    if "gradient_clipping" not in way:
        kind, params = "WarmupDecayLR", rate | {"total_num_steps": num_steps}
    scheduler = {"type": kind, "params": params}
    config = {"execution": "fused", "persistence_threshold": 1, "scheduler": scheduler}
    config |= {key: value for key, value in way.items() if key != FREEZE}
    tx = None
    if FREEZE in way:
        adam = optax.adam(build_schedule(zinf.Config.load(config)))
        tx = zinf.compressed(adam, freeze_step=way[FREEZE])
    random, content, length = np.random.default_rng(seed), text(), SHAPE.max_length
    init, loss = init_and_loss(SHAPE, seed=seed)
    engine = zinf.initialize(loss, init, tx, config)
    found = []
    with engine:
        for _ in range(num_steps):
            starts = random.integers(0, len(content) - length - 1, batch)
            tokens = np.stack([content[i : i + length + 1] for i in starts])
            try:
                found.append(engine.step({"tokens": tokens.astype(np.int32)})["loss"])
            except NonFiniteError:
                break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tables", nargs="+", default=list(tables()))
    parser.add_argument("--ways", nargs="+", help="their names; all if absent")
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.device_count()} devices")
    for table in asked.tables:
        first = None
        for name, way in tables()[table].items():
            if asked.ways and name not in asked.ways:
                continue
            curve = losses(way, asked.steps, asked.batch, asked.seed)
            if len(curve) < asked.steps:
                print(f"{name}: diverges, no number at step {len(curve)}", flush=True)
                continue
            last = float(np.mean(curve[-LAST_STEPS:]))
            first = first or last
            every = np.array_split(curve, asked.steps // LAST_STEPS or 1)
            means = " ".join(f"{np.mean(part):.4f}" for part in every)
            print(f"{name}: {means}; {100 * (last / first - 1):+.2f}%", flush=True)


if __name__ == "__main__":
    main()
