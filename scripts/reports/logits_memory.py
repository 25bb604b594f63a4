"""Memory of a language model's loss: fused in pieces, and plain with all logits.

    python scripts/reports/logits_memory.py [--tokens 32768] [--vocab 131072]
        [--dim 1024]

The fused loss is `zinf.tiling.cross_entropy`. For value and gradients of both losses it
prints XLA's temporary bytes, for a CPU and, if the plugin that
`zinf_kernels.absent_gpu` names is installed, for GPUs. It also prints the peak of the
device tier in zinf's plan of a step, with weight, gradient and update. A plan uses all
memory that it may use, so the step with the fused loss, whose weight is in tiles, gets
a budget of 5% of the peak with the plain loss. The third figure is the plain loss with
a tenth of its peak, where zinf runs it in blocks of rows. All this is only compiled and
planned. `--step` also runs the step with the fused loss and prints the measured peak.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zinf
from zinf import tiling
from zinf.core.program import Tier
from zinf_kernels import absent_gpu

Sizes = tuple[int, int, int]  # tokens, channels, words
SHARE = 0.05
TIGHT_SHARE = 0.1
NUM_TILES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32 << 10)
    parser.add_argument("--vocab", type=int, default=128 << 10)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--gpu", nargs="*", default=["H200"], help="which GPUs")
    parser.add_argument("--step", action="store_true", help="run one step of zinf")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    sizes = options.tokens, options.dim, options.vocab
    print("{:,} tokens, {:,} channels, {:,} words".format(*sizes))
    print(f"{'':22}", *(f"{head:>18}" for head in ("plain", "fused", "share")))
    rows = list(measured(options, sizes))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measured(options: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    # In float32, because XLA makes float32 copies of bfloat16 arrays on a CPU.
    yield compiled("CPU", jnp.float32, compile_here, sizes)
    missing = absent_gpu.why_not()
    if missing:
        print(missing)
    for name in [] if missing else options.gpu:
        there = partial(absent_gpu.compile_for, absent_gpu.GPUS[name])
        yield compiled(name, jnp.bfloat16, there, sizes)
    plan, in_blocks = planned(sizes)
    yield plan
    yield in_blocks
    if options.step:
        yield stepped(sizes, plan["plain_bytes"])


def compile_here(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile()


def plain(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss from all logits in float32, the usual form."""
    logits = (x @ head).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def fused(x: jax.Array, head: Any, labels: jax.Array) -> jax.Array:
    return tiling.cross_entropy(jax.tree.leaves(head), x, labels).mean


def compiled(
    where: str, dtype: Any, run: Callable[..., Any], sizes: Sizes
) -> dict[str, Any]:
    """XLA's temporary bytes for the value and both gradients."""
    tokens, dim, vocab = sizes

    def temporary(loss: Callable[..., Any]) -> int:
        made = run(
            jax.value_and_grad(loss, (0, 1)),
            jax.ShapeDtypeStruct((tokens, dim), dtype),
            jax.ShapeDtypeStruct((dim, vocab), dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        return made.memory_analysis().temp_size_in_bytes

    return row(f"{where}, {jnp.dtype(dtype)}", temporary(plain), temporary(fused))


def planned(sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Peaks of the device tier in plans of zinf, with weight and gradient.

    The first row is for the fused loss, the second for the plain loss with a budget in
    which it does not fit whole.
    """
    batch = jax.eval_shape(partial(make_batch, sizes))

    def peak(loss: Callable[..., Any], device_bytes: int) -> int:
        given = problem(loss, sizes, device_bytes)
        return zinf.plan_only(*given, batch=batch).peak_bytes[Tier.DEVICE]

    # An ample budget: more than the logits, their gradient and the weights.
    tokens, dim, vocab = sizes
    ample = peak(plain, 16 * vocab * (tokens + 4 * dim))
    tight = int(TIGHT_SHARE * ample)
    return (
        row("plan, float32", ample, peak(fused, int(SHARE * ample))),
        row("plan, plain in blocks", ample, peak(plain, tight)),
    )


def stepped(sizes: Sizes, plain_bytes: int) -> dict[str, Any]:
    """Measured peak of the device tier in a step with the fused loss."""
    engine = zinf.initialize(*problem(fused, sizes, int(SHARE * plain_bytes)))
    metrics = engine.step(make_batch(sizes))
    engine.close()
    return row("ledger, float32", plain_bytes, metrics["device_bytes"])


def problem(loss: Callable[..., Any], sizes: Sizes, device_bytes: int) -> Any:
    """Arguments of `zinf.initialize`; for the fused loss the weight is in tiles."""
    _, dim, vocab = sizes
    num_tiles = 1 if loss is plain else NUM_TILES
    config = {
        "execution": "streamed",
        "zero_optimization": {
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "segment": {"max_bytes": 4 * dim * (vocab // num_tiles + 1)},
        "memory": {"device": device_bytes, "host": "100GiB"},
    }

    def params() -> Any:
        head = jax.random.normal(jax.random.key(0), (dim, vocab)) * dim**-0.5
        # "scale" is a trained parameter before the head, so that x needs a gradient.
        tiles = head if loss is plain else tiling.split(head, NUM_TILES)
        return {"scale": jnp.ones(dim), "head": tiles}

    def of_params(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] * params["scale"][None]
        return loss(x, params["head"], batch["labels"])

    return of_params, params, optax.adamw(1e-4), config


def make_batch(sizes: Sizes) -> Any:
    tokens, dim, vocab = sizes
    x = jax.random.normal(jax.random.key(1), (tokens, dim))
    return {
        "x": x,
        "labels": jax.random.randint(jax.random.key(2), (tokens,), 0, vocab),
    }


def row(where: str, plain_bytes: int, fused_bytes: int) -> dict[str, Any]:
    share = fused_bytes / plain_bytes
    print(
        f"{where:22} {plain_bytes:>18,} {fused_bytes:>18,} {share:>18.2%}", flush=True
    )
    made = {"plain_bytes": plain_bytes, "fused_bytes": fused_bytes, "share": share}
    return {"where": where, **made}


if __name__ == "__main__":
    main()
