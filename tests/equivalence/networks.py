"""Networks whose experts, weights or sequences devices may divide."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.equivalence.models import (
    LENGTH,
    LINEN,
    NNX,
    VOCAB,
    Model,
    draw_tokens,
)
from zinf.models import GPTConfig, init_and_loss
from zinf.moe import Router, balanced_bias, experts

EXPERTS, DIM, HIDDEN, TOKENS = 8, 8, 16, 4
# Of the 64 tokens of a microbatch, each of 8 devices has 8.
EXAMPLES, GROUP = 16, 8
DROPLESS = "top 2, none dropped"
NARROW = (jnp.bfloat16, jnp.float16)


def normal(random: np.random.Generator, *shape: int) -> jax.Array:
    values = random.standard_normal(shape, np.float32)
    return jnp.asarray(values * shape[-2] ** -0.5)


def draw_series(dim: int) -> Callable[[np.random.Generator, int], dict[str, Any]]:
    """Inputs x [examples, tokens, dim] and targets y [examples, tokens, 3]."""

    def draw(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
        shapes = {"x": (size, TOKENS, dim), "y": (size, TOKENS, 3)}
        return {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}

    return draw


# A layer for each router, so that a run covers all of them.


def router(**options: Any) -> Router:
    rest = {"group_size": GROUP, "min_capacity": 1} | options
    return Router(num_experts=EXPERTS, **rest)


FEW_ROUTERS = {
    "top 2": router(k=2),
    # More tokens than a device has: a routing group lies on two devices.
    "sigmoid, limited groups, bias, group of two devices": router(
        k=2,
        group_size=2 * GROUP,
        score_func="sigmoid",
        num_expert_groups=4,
        num_limited_groups=2,
        route_scale=2.5,
    ),
}
ROUTERS = FEW_ROUTERS | {
    "top 1, random tokens": router(k=1),
    "top 1, jitter": router(noisy_gate_policy="Jitter", use_rts=False, group_size=None),
    "top 1, noise": router(noisy_gate_policy="RSample"),
    DROPLESS: router(k=2, drop_tokens=False),
    "top 3, one group": router(k=3, group_size=None),
    "top 3 by place, one group": router(k=3, drop_policy="position", group_size=None),
    "experts choose": router(k=2, expert_choice=True, may_see_later_tokens=True),
}


def expert(weights: Any, rows: jax.Array) -> jax.Array:
    hidden = jnp.tanh(rows @ weights["up"] + weights["bias"][None])
    return hidden @ weights["down"]


def routed(name: str, routers: Mapping[str, Router]) -> Model:
    def init() -> dict[str, Any]:
        random = np.random.default_rng(0)

        def layer() -> dict[str, jax.Array]:
            return {
                "router": normal(random, DIM, EXPERTS),
                "up": normal(random, EXPERTS, DIM, HIDDEN),
                "bias": normal(random, EXPERTS, HIDDEN) * 0.1,
                "down": normal(random, EXPERTS, HIDDEN, DIM),
            }

        # Weights around experts, which `tensor` cuts.
        first, second = normal(random, DIM, HIDDEN), normal(random, HIDDEN, DIM)
        around = {"first": first, "second": second, "out": normal(random, DIM, 3)}
        return around | {f"layer {i}": layer() for i in range(len(routers))}

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        """Each layer reads what the one before made.

        In 16 bits all read the input: what devices add in another order may be rounded
        to another number, and a router that reads that may choose another expert.
        """
        x = batch["x"].reshape(-1, DIM).astype(params["out"].dtype)
        x += jnp.tanh(x @ params["first"]) @ params["second"]
        first = x if x.dtype in NARROW else None
        aux_loss, choices = jnp.float32(0), {}
        for i, (name, router) in enumerate(routers.items()):
            p = params[f"layer {i}"]
            bias = state if router.score_func == "sigmoid" else None
            read = x if first is None else first
            own_key = jax.random.fold_in(key, i)
            routing = router(p["router"], read, key=own_key, bias_E=bias)
            if bias is not None:
                state = balanced_bias(state, routing.counts, 0.1)
            weights = {name: p[name] for name in ("up", "bias", "down")}
            routes = routing.choice, routing.gate
            x += experts(expert, weights, read, *routes, capacity=routing.capacity)
            aux_loss += routing.aux_loss
            choices[name] = routing.choice
        error = (x @ params["out"]).astype(jnp.float32) - batch["y"].reshape(-1, 3)
        return jnp.mean(error**2) + 0.01 * aux_loss, (state, choices)

    return Model(
        name,
        init,
        loss,
        draw_series(DIM),
        size=EXAMPLES,
        # One segment of several layers compiles faster than each alone.
        config={
            "persistence_threshold": 1,
            "segment": {"remat": "always", "max_bytes": "64KiB"},
        },
        options={
            "has_aux": True,
            "rng": jax.random.key(3),
            "model_state": np.zeros(EXPERTS, np.float32),
        },
    )


ROUTED = routed("all routers", ROUTERS)
FEW_ROUTED = routed("two routers", FEW_ROUTERS)


# Attention and an MLP, which `tensor` divides by heads and hidden units.

WIDTH, HEADS, UNITS, LAYERS = 16, 8, 64, 2
COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")


def attention_init() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def layer() -> dict[str, jax.Array]:
        return {
            **{name: normal(random, WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
            "up": normal(random, WIDTH, UNITS),
            "bias": normal(random, 1, UNITS)[0] * 0.1,
            "down": normal(random, UNITS, WIDTH),
            "last": normal(random, 1, WIDTH)[0] * 0.1,
        }

    layers = {f"layer {i}": layer() for i in range(LAYERS)}
    return layers | {"out": normal(random, WIDTH, 3)}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3)


def attention_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["out"].dtype)
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    for i in range(LAYERS):
        p, h = params[f"layer {i}"], normed(x)
        q, k, v = ((h @ p[name]).reshape(heads) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += y.reshape(x.shape) @ p["o"]
        hidden = jnp.tanh(normed(x) @ p["up"] + p["bias"][None, None])
        x += hidden @ p["down"] + p["last"][None, None]
    error = (normed(x) @ params["out"]).astype(jnp.float32) - batch["y"]
    return jnp.mean(error**2)


ATTENTION = Model(
    "attention",
    attention_init,
    attention_loss,
    draw_series(WIDTH),
    size=8,
    # Vectors of WIDTH are whole.
    config={
        "persistence_threshold": 4 * WIDTH + 1,
        "segment": {"remat": "always", "max_bytes": 8 * WIDTH * UNITS},
    },
)


# Language models. A routing group of 8 tokens is one example.

GPT_EXPERTS = 4


def language(name: str, model: Model | None = None, **options: Any) -> Model:
    """A GPT of these options, or a model of tokens under another name."""
    if model is None:
        sizes = {"num_heads": 4, "embed_dim": 16, "vocab_size": VOCAB}
        shape = GPTConfig(**sizes, max_length=LENGTH, **options)
        init, loss = init_and_loss(shape, seed=0)
    else:
        init, loss = model.init, model.loss
    config = {"persistence_threshold": 1}
    return Model(name, init, loss, draw_tokens, size=8, config=config)


# Experts take as many tokens of a routing group as they get on average, or all.
GPT_CAPACITY, GPT_DROPLESS = (
    language(
        name,
        num_layers=1,
        num_experts=GPT_EXPERTS,
        experts_per_token=1,
        capacity_factor=factor,
        routing_group_size=LENGTH,
    )
    for name, factor in (("capacity", 1.0), ("dropless", None))
)
# Stacked layers; a Llama with one head of keys; a Transformer with two heads.
STACKED = language("stacked", num_layers=2, scan_layers=True, remat=True)
LLAMA, TRANSFORMER = language("llama", NNX), language("transformer", LINEN)
