"""`attention`: signature, checks, choice of implementation."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zinf_kernels.attention import equation
from zinf_kernels.attention.rows import (
    EXISTING,
    asked_row,
    chosen,
    obstacles,
    place_for,
)
from zinf_kernels.attention.spec import OPTIONAL, Operands, Spec, shape_of
from zinf_kernels.device import device_for

__all__ = ["EXISTING", "attention", "obstacles"]
TOKENS = ("_segments", "_positions")


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    causal: bool = False,
    window: int | None = None,
    q_segments: Int[Array, "#B T"] | None = None,
    k_segments: Int[Array, "#B S"] | None = None,
    q_positions: Int[Array, "#B T"] | None = None,
    k_positions: Int[Array, "#B S"] | None = None,
    mask: Bool[Array, "#B #N #T S"] | None = None,
    bias: Float[Array, "#B #N #T S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Any = None,
    implementation: str = "auto",
) -> Float[Array, "B T N V"]:
    """softmax(scale * q k^T) v for each head, over the keys that a query sees.

    It is one equation of a traced program (but for implementations that hold scores),
    and differentiable in reverse by `q`, `k`, `v`, `bias` and `sinks`. A query that
    sees no key has a finite result without meaning. Scores and sums over keys are
    float32 (float64 of float64); weights are rounded to the dtype of `v` before they
    are multiplied with it.

    Args:
        q, k, v: of one dtype: float32, bfloat16, float16 or float64. Head n of the
            queries reads head n // (N / K) of the keys. V may differ from H.
        causal: a query sees no key at a later position.
        window: a query sees keys at fewer than `window` positions from its own, so that
            a causal query sees `window` keys at most.
        q_segments, k_segments: a query sees keys of its own segment only. `k_segments`
            are `q_segments` if there are as many keys as queries. Some kernels take no
            others.
        q_positions, k_positions: for `causal` and `window`; by default tokens count
            from 0.
        mask: True where a query sees a key, besides all of the above.
        bias: is added to the scaled (and capped) scores.
        sinks: a score per head that takes part in the softmax without a value.
        scale: H ** -0.5 by default.
        soft_cap: scores are `soft_cap * tanh(score / soft_cap)`.
        dropout: share of the weights that are set to zero; the others are divided by
            1 - dropout. Which ones depends on `dropout_key` and the implementation.
        implementation: "cudnn"; "triton" and "splash", jax's Pallas kernels for GPUs
            and TPUs, or "pallas" for that of the platform; "blocks" (no scores in
            memory, any platform and dtype); "xla" (all scores at once); "reference".
            "auto" is what `choosing` says, as in zinf's engine; elsewhere "xla" where
            scores take at most 64 MiB, and else "blocks".

    Raises:
        ValueError: shapes, dtypes or settings do not fit together, or the
            implementation does not compute this; the message says which.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q_segments is not None and k_segments is None and q.shape[1] == k.shape[1]:
        k_segments = q_segments
    spec = Spec(
        scale=scale,
        implementation=implementation,
        causal=causal,
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        dropout=float(dropout),
        keys_apart=k_segments is not q_segments,
    )
    key = dropout_key if dropout else None
    rest = q_segments, k_segments, q_positions, k_positions, mask, bias, sinks, key
    given = dict(zip(OPTIONAL, rest, strict=True))
    operands = {"q": q, "k": k, "v": v}
    operands |= {name: x for name, x in given.items() if x is not None}
    _check(spec, operands)
    if implementation == "auto":
        name = chosen(spec, operands)
    else:
        name = asked_row(implementation, device_for(q), spec, operands)
    spec = replace(spec, implementation=name, place=place_for(q))
    return equation.bind(spec, operands)


def _check(spec: Spec, operands: Operands) -> None:
    shapes = {name: jnp.shape(x) for name, x in operands.items()}
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shapes[name]) != 4 for name in "qkv"):
        raise ValueError(
            f"attention takes (batch, tokens, heads, width), and was given {told}."
        )
    batch, queries, keys, heads, key_heads, width, _ = shape_of(operands)
    key_shape = (batch, keys, key_heads, width)
    if shapes["k"] != key_shape or shapes["v"][:3] != key_shape[:3]:
        raise ValueError(
            f"Shapes do not fit together: {told}. Batches of q, k and v are equal; k "
            "and v have the same tokens and heads, q and k the same width."
        )
    if not key_heads or heads % key_heads:
        raise ValueError(
            f"q has {heads} heads and k {key_heads}. Each head of k serves the same "
            "number of heads of q."
        )
    dtypes = {str(operands[name].dtype) for name in "qkv"}
    if len(dtypes) > 1 or not jnp.issubdtype(operands["q"].dtype, jnp.floating):
        raise ValueError(
            f"q, k and v are {', '.join(sorted(dtypes))}. Convert them to one floating "
            "dtype."
        )
    _check_settings(spec, keys)
    if ("q_segments" in operands) != ("k_segments" in operands):
        raise ValueError(
            f"Segments of queries and of keys go together, and {queries} queries meet "
            f"{keys} keys. Pass q_segments and k_segments."
        )
    rows = {"q": (batch, queries), "k": (batch, keys)}
    for name in [n for n in operands if n.endswith(TOKENS)]:
        _check_shape(name, shapes[name], rows[name[0]], free=1)
        if not jnp.issubdtype(operands[name].dtype, jnp.integer):
            raise ValueError(
                f"{name} are {operands[name].dtype}. Convert them to int32."
            )
    for name in [n for n in operands if n in ("mask", "bias")]:
        _check_shape(name, shapes[name], (batch, heads, queries, keys), free=3)
    if "mask" in operands and operands["mask"].dtype != jnp.bool_:
        raise ValueError(
            f"mask is {operands['mask'].dtype}. Pass booleans, True where a query sees "
            "a key; pass numbers that are added to scores as bias."
        )
    if "sinks" in operands:
        _check_shape("sinks", shapes["sinks"], (heads,), free=0)
    if spec.dropout and "dropout_key" not in operands:
        raise ValueError(f"dropout is {spec.dropout} without a key. Pass dropout_key.")


def _check_settings(spec: Spec, num_keys: int) -> None:
    if spec.window is not None and not 1 <= spec.window <= num_keys:
        raise ValueError(
            f"window is {spec.window:,} and there are {num_keys:,} keys. Pass 1 to "
            f"{num_keys:,}, or None for all keys."
        )
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        raise ValueError(
            f"soft_cap is {spec.soft_cap}. Pass a positive number or None."
        )
    if not 0 <= spec.dropout < 1:
        raise ValueError(f"dropout is {spec.dropout}. Pass 0 or more, and less than 1.")


def _check_shape(
    name: str, shape: tuple[int, ...], full: tuple[int, ...], *, free: int
) -> None:
    """Raises unless a shape is `full`, or has 1 in any of the first `free` dims."""
    fits = len(shape) == len(full) and all(
        n == whole or (n == 1 and dim < free)
        for dim, (n, whole) in enumerate(zip(shape, full, strict=True))
    )
    if not fits:
        ones = f", with 1 for any of the first {free}" if free > 1 else ""
        ones = ", or 1 in place of the first" if free == 1 else ones
        raise ValueError(f"{name} has shape {shape}. Pass {full}{ones}.")
