"""Named attentions for tests and benchmarks: shapes, dtypes, what hides keys."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_DRAWN_SCORES = 2**21


@dataclass(frozen=True)
class Case:
    """One attention; `make` makes its arrays.

    Attributes:
        extras: names of arrays besides q, k and v.
        options: arguments of `attention` that are no arrays.
    """

    name: str
    batch: int = 2
    queries: int = 100
    keys: int = 100
    heads: int = 4
    key_heads: int = 4
    width: int = 16
    value_width: int = 16
    dtype: Any = jnp.float32
    extras: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of q, k, v, segments and sinks."""
        keys = self.batch, self.keys, self.key_heads
        found = {
            "q": (self.batch, self.queries, self.heads, self.width),
            "k": (*keys, self.width),
            "v": (*keys, self.value_width),
        }
        shapes = {n: jax.ShapeDtypeStruct(s, self.dtype) for n, s in found.items()}
        if "segments" in self.extras:
            ids = jax.ShapeDtypeStruct((self.batch, self.keys), jnp.int32)
            shapes |= {"q_segments": ids, "k_segments": ids}
        if "sinks" in self.extras:
            shapes["sinks"] = jax.ShapeDtypeStruct((self.heads,), self.dtype)
        return shapes

    def make(self, *, seed: int = 0) -> dict[str, jax.Array]:
        """Arguments of `attention` by name, and the cotangent as `direction`."""
        random = np.random.default_rng(seed)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(random.standard_normal(shape), self.dtype)

        arrays = {
            "q": normal(self.batch, self.queries, self.heads, self.width),
            "k": normal(self.batch, self.keys, self.key_heads, self.width),
            "v": normal(self.batch, self.keys, self.key_heads, self.value_width),
            "direction": normal(self.batch, self.queries, self.heads, self.value_width),
        }
        pairs = self.queries, self.keys
        for name in self.extras:
            if name == "segments":
                ids = np.sort(random.integers(0, 4, (self.batch, self.keys)), axis=1)
                arrays["k_segments"] = jnp.asarray(ids, jnp.int32)
                arrays["q_segments"] = arrays["k_segments"][:, -self.queries :]
            elif name == "positions":
                # The queries are the last of the tokens.
                first = self.keys - self.queries
                arrays["q_positions"] = first + jnp.arange(self.queries)[None]
            elif name == "mask":
                mask = random.random((self.batch, 1, *pairs)) < 0.6
                arrays["mask"] = jnp.asarray(mask)
            elif name == "bias":
                arrays["bias"] = normal(1, self.heads, *pairs)
            elif name == "sinks":
                arrays["sinks"] = normal(self.heads)
        return arrays


def cases() -> Iterator[Case]:
    """Each feature alone, and some together; sizes that no block divides."""
    causal = {"causal": True}
    yield Case("plain")
    yield Case("causal", options=causal)
    yield Case("long", queries=1100, keys=1100, heads=2, key_heads=1, options=causal)
    yield Case("grouped", heads=8, key_heads=2, options=causal)
    yield Case("one head of keys", heads=8, key_heads=1)
    yield Case("window", queries=700, keys=700, options=causal | {"window": 90})
    yield Case("window both sides", queries=600, keys=600, options={"window": 33})
    yield Case("soft cap", options=causal | {"soft_cap": 2.0})
    yield Case("sinks", extras=("sinks",), options=causal)
    yield Case("segments", queries=600, keys=600, extras=("segments",), options=causal)
    yield Case("cross", queries=70, keys=130, extras=("segments",))
    yield Case("mask", extras=("mask",))
    yield Case("bias", queries=90, keys=600, extras=("bias",))
    yield Case("next token", queries=1, keys=600, extras=("positions",), options=causal)
    yield Case("wide values", value_width=24, options=causal)
    yield Case("narrow values", width=24, value_width=8, options={"scale": 0.3})
    yield Case("bfloat16", dtype=jnp.bfloat16, options=causal)
    yield Case("float16", queries=600, keys=600, dtype=jnp.float16, options=causal)
    yield Case(
        "all",
        queries=600,
        keys=650,
        heads=6,
        key_heads=3,
        value_width=8,
        extras=("segments", "positions", "mask", "bias", "sinks"),
        options=causal | {"window": 200, "soft_cap": 3.0},
    )


def drawn(seed: int) -> Case:
    """A case drawn at random: widths 16 to 256, groups of 1 to 8, lengths to 1,200.

    It has at most `MAX_DRAWN_SCORES` scores, which the formula holds several times.
    """
    random = np.random.default_rng(seed)
    groups, key_heads = int(random.integers(1, 9)), int(random.integers(1, 3))
    batch = int(random.integers(1, 3))
    rows = batch * groups * key_heads
    most = min(1200, isqrt(MAX_DRAWN_SCORES // rows))
    keys = int(random.integers(2, most + 1))
    queries = keys if random.random() < 0.7 else int(random.integers(1, keys + 1))
    options: dict[str, Any] = {"causal": bool(random.random() < 0.7)}
    if random.random() < 0.4:
        options["window"] = int(random.integers(1, keys + 1))
    if random.random() < 0.3:
        options["soft_cap"] = float(random.uniform(1, 30))
    names = ("segments", "mask", "bias", "sinks", "positions")
    extras = tuple(name for name in names if random.random() < 0.25)
    width = int(random.choice([16, 64, 80, 128, 256]))
    same = random.random() < 0.8
    return Case(
        f"drawn {seed}",
        batch=batch,
        queries=queries,
        keys=keys,
        heads=groups * key_heads,
        key_heads=key_heads,
        width=width,
        value_width=width if same else int(random.choice([16, 64, 128])),
        extras=extras,
        options=options,
    )


def benchmark_cases(tokens: int) -> Iterator[Case]:
    """Llama 8B's attention, one sequence."""
    sizes = {"heads": 32, "key_heads": 8, "width": 128, "value_width": 128}
    for dtype in (jnp.bfloat16, jnp.float32):
        yield Case(
            f"{jnp.dtype(dtype).name} {tokens}",
            1,
            tokens,
            tokens,
            dtype=dtype,
            options={"causal": True},
            **sizes,
        )
