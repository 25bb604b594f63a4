"""Trains a GPT on one long sequence, with a small device and with a large one.

    python scripts/bench/bench_long.py [--num-layers 4] [--lengths 8192 32768]
        [--budgets 1GiB 8GiB] [--steps 2]

The model has width 256, 4 heads and 16,384 words: 7.4M parameters with 4 layers. Each
length is trained with each budget of device memory, in which arrays, activations and
workspace of the device must fit; what does not fit goes to the host. Losses of one
length must agree but for the order of sums. For each step are printed the loss, its
bits, seconds, and how many operations of the model a second makes; `growth` is seconds
by operation over those of the first run's fastest step, 1 if time grows as operations.

Operations of the model, for T tokens, L layers, width D and V words: 12 L D^2 weights
of layers are multiplied with each token forward, again where the backward pass
recomputes a layer, and twice backward; the V D weights of the head three times. Causal
attention has T (T + 1) / 2 pairs a head. It computes two products forward, two where
they are recomputed, and five backward.
"""

import argparse
import gc
import time

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import zinf
from zinf.core.plan import show_bytes
from zinf.models import GPTConfig, init_and_loss

WIDTH, HEADS, WORDS = 256, 4, 16384
COLUMNS = ("layers", "tokens", "device", "used", "blocks", "step", "loss", "bits")
RATES = ("seconds", "Tflop", "Gflop/s", "growth")


def main() -> None:
    options = _parse()
    zinf.tune_malloc()
    table = Table(*COLUMNS, *RATES, box=None)
    first = 0.0
    for length in options.lengths:
        flops = model_flops(options.num_layers, length)
        for budget in options.budgets:
            used, blocks, steps = _train(options, length, budget)
            first = first or min(seconds for _, seconds in steps) / flops
            for number, (loss, seconds) in enumerate(steps):
                table.add_row(
                    *(str(options.num_layers), f"{length:,}", budget),
                    *(show_bytes(used), str(blocks), str(number)),
                    *(f"{loss:.7f}", loss.hex(), f"{seconds:.1f}"),
                    f"{flops / 1e12:.3f}",
                    f"{flops / seconds / 1e9:.1f}",
                    f"{seconds / flops / first:.3f}",
                )
    Console(width=160, highlight=False).print(table)


def model_flops(num_layers: int, length: int) -> int:
    """Floating-point operations of a step; see the top of the file."""
    weights = 2 * length * (4 * 12 * num_layers * WIDTH**2 + 3 * WORDS * WIDTH)
    product = 2 * WIDTH * length * (length + 1) // 2
    return weights + num_layers * 9 * product


def _train(
    options: argparse.Namespace, length: int, budget: str
) -> tuple[int, int, list[tuple[float, float]]]:
    """The most bytes on the device, blocks of rows, and each step's loss and time."""
    model = GPTConfig(
        num_layers=options.num_layers,
        num_heads=HEADS,
        embed_dim=WIDTH,
        vocab_size=WORDS,
        max_length=length,
        position="rope",
    )
    init, loss = init_and_loss(model, seed=0)
    # Few of the words, so that even the first steps learn something.
    tokens = np.random.default_rng(0).integers(0, 256, (1, length + 1), np.int32)
    batch = {"tokens": tokens}
    # Residuals, if kept, would be another executable with other roundings.
    config = {
        "execution": "streamed",
        "memory": {"device": budget},
        "segment": {"remat": "always"},
    }
    steps = []
    with zinf.initialize(loss, init, optax.adamw(1e-3), config, batch=batch) as engine:
        for _ in range(options.steps):
            began = time.perf_counter()
            metrics = engine.step(batch)
            steps.append((float(metrics["loss"]), time.perf_counter() - began))
        used = int(metrics["device_bytes"])
        program = engine._runners.current.passes.program
        blocks = max(segment.row_blocks for segment in program.segments)
    gc.collect()
    return used, blocks, steps


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--budgets", nargs="+", default=["1GiB", "8GiB"])
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
