"""Four small networks of different frameworks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zinf
from zinf import Engine
from zinf.models import GPT, GPTConfig, next_token_loss

BATCH, LENGTH, VOCAB, DIM, LAYERS = 4, 8, 32, 16, 3
# Two whole blocks of attention by `blocks`, and a part of one.
LONG_LENGTH = 1100


@dataclass(frozen=True, eq=False)
class Model:
    """A network as its users would hand it to zinf.

    Attributes:
        init: `() -> params`, the pytree that `loss` takes.
        draw: `(random generator, number of examples) -> batch`.
        make: `(tx, config, **options) -> Engine`; by default `zinf.initialize`.
        size: examples of a microbatch. Microbatches are of one size, so that settings
            compile the same code.
        config: settings that the network needs.
        options: arguments of `zinf.initialize`.
    """

    name: str
    init: Callable[[], Any]
    loss: Callable[..., Any]
    draw: Callable[[np.random.Generator, int], Any]
    make: Callable[..., Engine] | None = None
    size: int = BATCH
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(
        self, tx: optax.GradientTransformation, config: Any, **more: Any
    ) -> Engine:
        if self.make is not None:
            return self.make(tx, config, **more)
        options = {**self.options, **more}
        return zinf.initialize(self.loss, self.init, tx, config, **options)

    def batches(self, num: int, num_microbatches: int = 1) -> list[Any]:
        random = np.random.default_rng(1)
        return [self.draw(random, self.size * num_microbatches) for _ in range(num)]


def draw_tokens(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    return {"tokens": random.integers(0, VOCAB, (size, LENGTH + 1), np.int32)}


def draw_signals(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    x = random.standard_normal((size, 1, LENGTH), np.float32)
    return {"x": x, "label": (x.sum((1, 2)) > 0).astype(np.int32)}


def draw_vectors(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    x = random.standard_normal((size, DIM), np.float32)
    return {"x": x, "y": np.sin(x)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


# Linen: a Transformer with tied embeddings and attention from the library.


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, DIM)
        x = embed(tokens)
        x += self.param("position", nn.initializers.normal(0.02), (1, LENGTH, DIM))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(2, use_bias=False)
            x += attention(nn.LayerNorm(use_bias=False)(x), mask=mask)
            hidden = nn.Dense(2 * DIM)(nn.LayerNorm(use_bias=False)(x))
            x += nn.Dense(DIM, use_bias=False)(nn.gelu(hidden))
        return embed.attend(nn.LayerNorm()(x))


def linen_loss(params: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    logits = Transformer().apply({"params": params}, tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


def linen_init() -> Any:
    tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return Transformer().init(jax.random.key(0), tokens)["params"]


def start_linen(
    tx: optax.GradientTransformation, config: Any, **options: Any
) -> Engine:
    def create() -> TrainState:
        apply = Transformer().apply
        return TrainState.create(apply_fn=apply, params=linen_init(), tx=tx)

    return zinf.linen.initialize(linen_loss, create, config, **options)


# NNX: zinf's own GPT in its Llama form.


def gpt(max_length: int = LENGTH) -> GPT:
    config = GPTConfig(
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=DIM,
        mlp_dim=2 * DIM,
        vocab_size=VOCAB,
        max_length=max_length,
        norm="rmsnorm",
        activation="swiglu",
        position="rope",
        tied_embeddings=False,
        use_bias=False,
    )
    return GPT(config, rngs=nnx.Rngs(0))


def nnx_loss(params: Any, batch: Any) -> jax.Array:
    graphdef = nnx.graphdef(nnx.eval_shape(gpt))
    return next_token_loss(nnx.merge(graphdef, params), batch)


def nnx_init() -> Any:
    return nnx.to_pure_dict(nnx.state(gpt()))


def start_nnx(tx: optax.GradientTransformation, config: Any, **options: Any) -> Engine:
    return zinf.nnx.initialize(next_token_loss, gpt, tx, config, **options)


# The same with one long sequence, whose attentions hold no scores.


def draw_long(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    return {"tokens": random.integers(0, VOCAB, (size, LONG_LENGTH + 1), np.int32)}


def start_long(tx: optax.GradientTransformation, config: Any, **options: Any) -> Engine:
    make = partial(gpt, LONG_LENGTH)
    return zinf.nnx.initialize(next_token_loss, make, tx, config, **options)


# Equinox: a residual convolution net with normalisation, as a module of arrays.


class Block(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.GroupNorm

    def __init__(self, key: jax.Array):
        self.conv = eqx.nn.Conv1d(8, 8, 3, padding=1, use_bias=False, key=key)
        self.norm = eqx.nn.GroupNorm(2, 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.norm(self.conv(x)))


class ConvNet(eqx.Module):
    stem: eqx.nn.Conv1d
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        stem, head, *keys = jax.random.split(key, LAYERS + 2)
        self.stem = eqx.nn.Conv1d(1, 8, 3, padding=1, key=stem)
        self.blocks = [Block(k) for k in keys]
        self.head = eqx.nn.Linear(8, 2, key=head)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))


def conv_arrays() -> ConvNet:
    return eqx.filter(ConvNet(jax.random.key(0)), eqx.is_array)


def equinox_loss(params: ConvNet, batch: Any) -> jax.Array:
    static = eqx.filter(eqx.filter_eval_shape(ConvNet, jax.random.key(0)), is_static)
    x = batch["x"].astype(params.stem.weight.dtype)
    logits = jax.vmap(eqx.combine(params, static))(x)
    return cross_entropy(logits, batch["label"])


def is_static(leaf: Any) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct)


# A plain pytree: an MLP whose layers are stacked and run in one `lax.scan`.


def mlp_params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    scale = DIM**-0.5
    return {
        "layers": {
            "w": jax.random.normal(keys[0], (LAYERS, DIM, DIM)) * scale,
            "b": jnp.zeros((LAYERS, DIM)),
        },
        "out": jax.random.normal(keys[1], (DIM, DIM)) * scale,
        "temperature": jnp.float32(1.0),
    }


def mlp_loss(params: dict[str, Any], batch: Any) -> jax.Array:
    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["w"] + p["b"][None]), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    out = params["temperature"] * (x @ params["out"])
    return jnp.mean(jnp.square(out - batch["y"]).astype(jnp.float32))


PYTREE = Model("pytree", mlp_params, mlp_loss, draw_vectors)
LINEN = Model("linen", linen_init, linen_loss, draw_tokens, start_linen)
NNX = Model("nnx", nnx_init, nnx_loss, draw_tokens, start_nnx)
LONG = Model(
    "long",
    nnx_init,
    nnx_loss,
    draw_long,
    start_long,
    size=1,
    config={"model": {"attention": "blocks"}},
)
EQUINOX = Model("equinox", conv_arrays, equinox_loss, draw_signals)
MODELS = (PYTREE, LINEN, NNX, EQUINOX)
