"""Section of gpu_check.py: each implementation of attention, right or not, how fast.

One causal attention of Llama 8B's shape in bfloat16, its result and its gradients. Each
row is first compared with `blocks` (plain jnp) on 4,096 tokens, as a run does before it
takes a kernel: also with a window and with packed segments, where the kernel has them.
Then its seconds, its rate of the flops that positions allow, and the compiler's
temporary bytes are measured. XLA, which holds all scores, is the comparison at 4,096
tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_rows import MIB, Rows, Setting, Skipped, imported, timed

ROWS, DRY_ROWS = ("cudnn", "triton", "blocks", "xla"), ("blocks", "xla")
TOKENS, DRY_TOKENS = (4096, 32768), (128,)
HEADS, KEY_HEADS, WIDTH = 32, 8, 128
# XLA's scores of 32,768 tokens would take 137 GB.
MOST_SCORE_BYTES = 16 << 30
SECONDS = 0.3
# A backward pass has five products where the forward pass has two.
BACKWARD_TIMES = 2.5


def run(setting: Setting, rows: Rows) -> None:
    device = imported("zinf_kernels.device").device_of(setting.device())
    chooser = imported("zinf.core.step.attention").AttentionRows(device)
    tokens = DRY_TOKENS if setting.is_dry else TOKENS
    names = DRY_ROWS if setting.is_dry else ROWS
    wrong: list[str] = []
    for name in names:
        for what, spec, operands in variants(tokens[0]):
            of = {"row": name, "what": what}
            compare = partial(_compare, rows, chooser, spec, operands, wrong, **of)
            rows.attempt("agrees with plain JAX", compare, **of)
    for count in tokens:
        _, spec, operands = next(variants(count))
        for name in names:
            measure = partial(_measure, rows, device, name, spec, operands)
            rows.attempt("seconds", measure, row=name, tokens=count)
    if wrong:
        raise AssertionError(
            f"Do not use these kernels on this machine. {' '.join(wrong)}"
        )


def _compare(
    rows: Rows,
    chooser: Any,
    spec: Any,
    operands: dict[str, Any],
    wrong: list[str],
    *,
    row: str,
    what: str,
) -> None:
    """Adds a row; and to `wrong`, if numbers differ from those of `blocks`."""
    _refuse(row, chooser.device, spec, operands)
    failure = chooser.trial(row, spec, operands)
    is_right = failure is None
    rows.add("agrees with plain JAX", is_right, note=failure or "", row=row, what=what)
    if failure is not None:
        wrong.append(f"{row}, {what}: {failure}")


def variants(num_tokens: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Attentions by name: settings, and shapes of the arrays."""
    make = imported("zinf_kernels.attention").Spec
    shape = jax.ShapeDtypeStruct
    keys = shape((1, num_tokens, KEY_HEADS, WIDTH), jnp.bfloat16)
    queries = shape((1, num_tokens, HEADS, WIDTH), jnp.bfloat16)
    plain = {"q": queries, "k": keys, "v": keys}
    ids = shape((1, num_tokens), jnp.int32)
    scale = WIDTH**-0.5
    yield "causal", make(scale=scale, causal=True), plain
    yield "window", make(scale=scale, causal=True, window=num_tokens // 4), plain
    packed = plain | {"q_segments": ids, "k_segments": ids}
    yield "packed", make(scale=scale, causal=True), packed


def _refuse(name: str, device: Any, spec: Any, operands: Any) -> None:
    """Skips what an implementation does not compute, and scores that are too large."""
    kernels = imported("zinf_kernels.attention")
    against = kernels.obstacles(device, spec=spec, operands=operands)
    if name in against:
        raise Skipped(against[name])
    size = imported("zinf_kernels.attention.spec").score_bytes(operands)
    if name == "xla" and size > MOST_SCORE_BYTES:
        raise Skipped(f"scores would take {size:,} bytes.")


def _measure(
    rows: Rows, device: Any, name: str, spec: Any, operands: dict[str, Any]
) -> None:
    """Seconds of the result, and of the result with its gradients."""
    _refuse(name, device, spec, operands)
    kernels = imported("zinf_kernels.attention")
    flops = kernels.attention_flops(spec, operands)
    keys = jax.random.split(jax.random.key(0), len(operands))
    arrays = [
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, operands.values(), strict=True)
    ]

    def result(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernels.attention(q, k, v, causal=True, implementation=name)

    def gradients(*qkv: jax.Array) -> Any:
        out, vjp = jax.vjp(result, *qkv)
        return vjp(out)

    passes: dict[str, tuple[Callable, float]] = {
        "forward": (result, 1.0),
        "with gradients": (gradients, 1 + BACKWARD_TIMES),
    }
    tokens = operands["q"].shape[1]
    for what, (function, times) in passes.items():
        of = {"row": name, "tokens": tokens, "pass": what}
        program: Any = jax.jit(function).lower(*arrays).compile()
        sizes = program.memory_analysis()
        if sizes is not None:
            rows.add("temporaries", sizes.temp_size_in_bytes / MIB, "MiB", **of)
        seconds = timed(
            lambda _, program=program: jax.block_until_ready(program(*arrays)),
            seconds=SECONDS,
        )
        rows.add_all("seconds", seconds, "s", **of)
        rows.add_rate("flops", times * flops / 1e12, seconds, "TFLOP/s", **of)
