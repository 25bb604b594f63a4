"""The largest layer that fits a device, by the number of tiles of its weight.

    python scripts/reports/tiling_table.py --nvme /tmp/tiles --run 4096 --run 8192

A layer of h x 4h in float32 (forward, backward and update, with all state on the NVMe
tier) is planned for a device budget of 2 GiB: for hidden sizes of 4K to 64K and 1 to 64
tiles. For each number of tiles the largest h that fits is printed too. Weight and
gradient take most of the memory, so h grows at best as the square root of the number of
tiles (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.3, measures the same
layer). With --run, a layer is trained for some steps with the fewest tiles that fit,
and the measured peak of the device tier is printed beside that of the plan.
"""

import argparse
import shutil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import InfeasibleError, Plan
from zinf.core.program import Tier
from zinf.core.step.planner import Planner
from zinf.core.step.shrink import Limits, compiled, cut
from zinf.core.step.stream import stream_segments

BUDGET = 2 << 30
TOKENS = 16
FACTORS = (1, 2, 4, 8, 16, 32, 64)
SIZES = (4096, 8192, 16384, 32768, 65536)
STEP = 128  # hidden sizes are multiples of this
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3, momentum=0.9),
}


def loss(params: Any, batch: Any) -> jax.Array:
    # "before" is a trained parameter in front of the layer, as in a model. Its gradient
    # needs the weight a second time.
    x = batch["x"] + jnp.broadcast_to(params["before"], batch["x"].shape)
    return jnp.mean(jnp.square(x @ params["kernel"] - batch["y"]))


def config(nvme: Path) -> dict[str, Any]:
    on_nvme = {"device": "nvme"}
    return {
        "execution": "streamed",
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_nvme,
            "offload_optimizer": on_nvme,
        },
        "memory": {
            "device": BUDGET,
            "host": 8 << 30,
            "nvme": [str(nvme)],
            "nvme_capacity": 1 << 40,
        },
    }


def tile_bytes(hidden: int, factor: int) -> int:
    return -(-hidden // factor) * 4 * hidden * 4


def initial(hidden: int) -> Any:
    return lambda: {
        "before": jnp.zeros(hidden),
        "kernel": jnp.full((hidden, 4 * hidden), hidden**-0.5),
    }


def batch_specs(hidden: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"x": (TOKENS, hidden), "y": (TOKENS, 4 * hidden)}
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def plan(
    hidden: int, factor: int, tx: optax.GradientTransformation, nvme: Path
) -> Plan | None:
    """The plan with exactly `factor` tiles; None if it does not fit."""
    planner: Planner = make_planner(loss, initial(hidden), tx, config(nvme))
    limits = Limits(tile_bytes(hidden, factor))
    source = planner.trace(batch_specs(hidden), limits.param_bytes)
    layouts = planner.layouts(source)
    segmented = cut(planner, source, layouts, limits.param_bytes)
    tilings = segmented.program.tilings
    assert len(tilings[0].tiles if tilings else [()]) == factor, (hidden, factor)
    made = compiled(planner, segmented, layouts, limits)
    try:
        return stream_segments(planner, segmented, made, limits).plan
    except InfeasibleError:
        return None


def largest(factor: int, tx: optax.GradientTransformation, nvme: Path) -> int:
    """The largest hidden size that fits, a multiple of `max(STEP, factor)`."""
    step = max(STEP, factor)
    # Starts near h = 8192 for one tile: its weight has 1 GiB, and so has its gradient.
    low, high = (int(share * 8192 * factor**0.5) // step for share in (0.8, 1.1))
    while high - low > 1:
        middle = (low + high) // 2
        fits = plan(middle * step, factor, tx, nvme) is not None
        low, high = (middle, high) if fits else (low, middle)
    return low * step


def train(hidden: int, name: str, num_steps: int, nvme: Path) -> None:
    """Trains with the fewest tiles that fit; prints the peak and the time."""
    tx = OPTIMIZERS[name]
    factor = next(f for f in FACTORS if plan(hidden, f, tx, nvme))
    random = np.random.default_rng(0)
    batch = {
        name: random.standard_normal(spec.shape, np.float32)
        for name, spec in batch_specs(hidden).items()
    }
    tiled = config(nvme) | {"segment": {"max_bytes": tile_bytes(hidden, factor)}}
    engine = zinf.initialize(loss, initial(hidden), tx, tiled)
    try:
        metrics = [engine.step(batch) for _ in range(num_steps)]
        predicted = engine.plan.peak_bytes[Tier.DEVICE]
        measured = max(m["device_bytes"] for m in metrics)
        assert measured <= predicted <= BUDGET, (measured, predicted)
        seconds = median(m["step_seconds"] for m in metrics[1:])
        print(
            f"| {hidden:,} | {16 * hidden * hidden / 2**30:.2f} | {name} | {factor} | "
            f"{predicted / 2**30:.3f} | {measured / 2**30:.3f} | {seconds:.1f} | "
            f"{metrics[0]['loss']:.4f}, {metrics[-1]['loss']:.4f} |",
            flush=True,
        )
    finally:
        engine.close()
        shutil.rmtree(nvme, ignore_errors=True)


def print_plans(tx: optax.GradientTransformation, nvme: Path) -> None:
    print("| hidden | weight GiB |", " | ".join(f"{f} tiles" for f in FACTORS), "|")
    print("|---" * (2 + len(FACTORS)) + "|")
    for hidden in SIZES:
        cells = []
        for factor in FACTORS:
            made = plan(hidden, factor, tx, nvme)
            peak = made.peak_bytes[Tier.DEVICE] / 2**30 if made else None
            cells.append("-" if peak is None else f"{peak:.2f}")
        weight = 16 * hidden * hidden / 2**30
        print(f"| {hidden:,} | {weight:.2f} |", " | ".join(cells), "|", flush=True)


def print_largest(tx: optax.GradientTransformation, nvme: Path) -> None:
    print("| tiles | largest hidden | over 1 tile | over its square root |")
    print("|---|---|---|---|")
    whole = largest(1, tx, nvme)
    for factor in FACTORS:
        hidden = largest(factor, tx, nvme)
        ratio = hidden / whole
        root = ratio / factor**0.5
        print(f"| {factor} | {hidden:,} | {ratio:.2f} | {root:.3f} |", flush=True)
        assert root >= 0.85, "less than what the memory law allows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, required=True, help="a folder to use")
    parser.add_argument("--run", type=int, action="append", default=[])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only-run", action="store_true", help="print no plans")
    arguments = parser.parse_args()
    tx = OPTIMIZERS[arguments.optimizer]
    if not arguments.only_run:
        start = perf_counter()
        print("Peak GiB of a device of 2 GiB, as planned; - does not fit\n")
        print_plans(tx, arguments.nvme)
        print()
        print_largest(tx, arguments.nvme)
        print(f"\nplanned in {perf_counter() - start:.0f} s\n", flush=True)
    if arguments.run:
        print(
            "| hidden | weight GiB | optimizer | tiles | planned GiB | measured GiB | "
            "s a step | first and last loss |"
        )
        print("|---" * 8 + "|", flush=True)
    for hidden in arguments.run:
        train(hidden, arguments.optimizer, arguments.steps, arguments.nvme)


if __name__ == "__main__":
    main()
