"""Times `zinf.moe.experts` beside other ways to compute experts, forward and backward.

    python scripts/bench/bench_experts.py [--experts 8 32 128] [--k 2] [--tokens 2048]
        [--dim 256] [--hidden 512] [--rounds 5]
    python scripts/bench/bench_experts.py --topology h200:1 v5p:1x1x1 [...]

The others: every expert on every token; `jax.lax.ragged_dot` on sorted rows; and a
gather of each token's own copy of the weights, where these take at most 4 GiB. The
contenders take turns. Seconds are medians and ranges; temporary bytes are the
compiler's. Their results must agree.

With `--topology`, the contenders are compiled for one device of each machine, absent or
not, and nothing runs: the table has the temporary bytes alone. Where a plugin for GPUs
is installed without a GPU, set JAX_PLATFORMS=cpu.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from zinf.core.topology import Topology, out_of_memory, parse_topology
from zinf.moe import experts

LARGEST_GATHER_BYTES = 4 << 30
# Sums of up to `tokens` float32 products, in four orders.
AGREEMENT = 1e-4


def mlp(weights: dict, rows: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(rows @ weights["gate"]) * (rows @ weights["up"])
    return hidden @ weights["down"]


def in_blocks(weights, x, choice, gate):
    return experts(mlp, weights, x, choice, gate)


def on_all_tokens(weights, x, choice, gate):
    results = jax.vmap(partial(mlp, rows=x))(weights)
    chosen = jax.nn.one_hot(choice, results.shape[0], dtype=x.dtype)
    return jnp.einsum("etd,tke,tk->td", results, chosen, gate)


def ragged(weights, x, choice, gate):
    num_experts, k = weights["up"].shape[0], choice.shape[1]
    order = jnp.argsort(choice.reshape(-1))
    sizes = jnp.bincount(choice.reshape(-1), length=num_experts)
    rows = x[order // k]
    dot = jax.lax.ragged_dot
    hidden = jax.nn.silu(dot(rows, weights["gate"], sizes))
    hidden = hidden * dot(rows, weights["up"], sizes)
    result = dot(hidden, weights["down"], sizes) * gate.reshape(-1)[order, None]
    return jnp.zeros_like(x).at[order // k].add(result)


def gathered(weights, x, choice, gate):
    own = jax.tree.map(lambda w: w[choice], weights)
    each = jax.vmap(jax.vmap(mlp, (0, None)))(own, x[:, None])[:, :, 0]
    return jnp.einsum("tkd,tk->td", each, gate)


CONTENDERS = {
    "blocks (zinf)": in_blocks,
    "all experts": on_all_tokens,
    "ragged_dot": ragged,
    "gather": gathered,
}


def main() -> None:
    options = _parse()
    if options.topology:
        table = Table("experts", "way", *options.topology, box=None)
        machines = [parse_topology(text) for text in options.topology]
        for num_experts in options.experts:
            for row in _temporaries(options, num_experts, machines):
                table.add_row(str(num_experts), *row)
    else:
        table = Table("experts", "way", "seconds", "over zinf", "temporary", box=None)
        for num_experts in options.experts:
            for row in _measure(options, num_experts):
                table.add_row(str(num_experts), *row)
    Console(width=100, highlight=False).print(table)


def _temporaries(
    options: argparse.Namespace, num_experts: int, machines: list[Topology]
) -> list[tuple[str, ...]]:
    given = jax.eval_shape(partial(_inputs, options, num_experts))
    rows: list[tuple[str, ...]] = []
    for name, function in CONTENDERS.items():
        cells = []
        for machine in machines:
            sharding = SingleDeviceSharding(machine.devices()[0])
            jitted = jax.jit(partial(_both, function), in_shardings=sharding)
            lowered = jitted.lower(*given)
            try:
                cells.append(_temporary(machine.compile(lowered)))
            except jax.errors.JaxRuntimeError as error:
                found = out_of_memory(error)
                if found is None:
                    raise
                cells.append("out of memory")
        rows.append((name, *cells))
    return rows


def _temporary(compiled: Any) -> str:
    return f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:.1f} MiB"


def _inputs(options: argparse.Namespace, num_experts: int) -> tuple:
    """Weights, tokens, choices, gates and a cotangent of the result."""

    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape) * shape[-2] ** -0.5

    dim, hidden, tokens = options.dim, options.hidden, options.tokens
    weights = {
        "gate": normal(0, num_experts, dim, hidden),
        "up": normal(1, num_experts, dim, hidden),
        "down": normal(2, num_experts, hidden, dim),
    }
    logits = normal(5, tokens, num_experts) * tokens**0.5
    gate, choice = jax.lax.top_k(jax.nn.softmax(logits), options.k)
    return weights, normal(3, tokens, dim), choice, gate, normal(4, tokens, dim)


def _both(function: Callable, weights, x, choice, gate, cotangent):
    """The result, and the gradients of all but the choices."""
    value, vjp = jax.vjp(lambda w, x, g: function(w, x, choice, g), weights, x, gate)
    return value, vjp(cotangent)


def _measure(options: argparse.Namespace, num_experts: int) -> list[tuple[str, ...]]:
    given = _inputs(options, num_experts)
    compiled = {}
    for name, function in CONTENDERS.items():
        own_bytes = 3 * options.tokens * options.k * options.dim * options.hidden * 4
        if name == "gather" and own_bytes > LARGEST_GATHER_BYTES:
            continue
        compiled[name] = jax.jit(partial(_both, function)).lower(*given).compile()
    wanted = compiled["blocks (zinf)"](*given)
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for number in range(options.rounds + 1):
        for name in random.sample(list(compiled), len(compiled)):
            began = time.perf_counter()
            found = jax.block_until_ready(compiled[name](*given))
            if number:  # The first call faults in memory.
                seconds[name].append(time.perf_counter() - began)
            else:
                _agree(name, found, wanted)
    best = median(seconds["blocks (zinf)"])
    return [
        (
            name,
            f"{median(took):.3f} ({min(took):.3f}-{max(took):.3f})",
            f"{median(took) / best:.1f}",
            _temporary(compiled[name]),
        )
        for name, took in seconds.items()
    ]


def _agree(name: str, found, wanted) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        far = float(np.abs(a - b).max() / np.abs(b).max())
        if not far < AGREEMENT:
            raise RuntimeError(f"{name} is {far:.1e} off, of the largest entry.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--topology", nargs="+", help="such as h200:1 v5p:1x1x1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
