"""Four small networks of different kinds, each as its users would hand it to zinf."""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Model:
    """A model for zinf, and the same for plain JAX.

    Attributes:
        start: `(tx, config) -> Engine`.
        loss: `(params, batch) -> loss` on the pytree that `engine.params()` returns.
        draw: `(random generator, batch size) -> batch`.
    """

    name: str
    start: Callable[..., Engine]
    loss: Callable[[Any, Any], jax.Array]
    draw: Callable[[np.random.Generator, int], Any]

    def batches(self, num: int, num_microbatches: int = 1) -> list[Any]:
        """Microbatches are of one size, so that all variants compile the same code."""
        random = np.random.default_rng(1)
        return [self.draw(random, BATCH * num_microbatches) for _ in range(num)]


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


def start_linen(tx: optax.GradientTransformation, config: Any) -> Engine:
    def create() -> TrainState:
        model, tokens = Transformer(), jnp.zeros((BATCH, LENGTH), jnp.int32)
        params = model.init(jax.random.key(0), tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return zinf.linen.initialize(linen_loss, create, config)


# NNX: zinf's own GPT in its Llama form.


def gpt() -> GPT:
    config = GPTConfig(
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=DIM,
        mlp_dim=2 * DIM,
        vocab_size=VOCAB,
        max_length=LENGTH,
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


def start_nnx(tx: optax.GradientTransformation, config: Any) -> Engine:
    return zinf.nnx.initialize(next_token_loss, gpt, tx, config)


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


def start_equinox(tx: optax.GradientTransformation, config: Any) -> Engine:
    return zinf.initialize(equinox_loss, conv_arrays, tx, config)


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


def start_mlp(tx: optax.GradientTransformation, config: Any) -> Engine:
    return zinf.initialize(mlp_loss, mlp_params, tx, config)


PYTREE = Model("pytree", start_mlp, mlp_loss, draw_vectors)
LINEN = Model("linen", start_linen, linen_loss, draw_tokens)
NNX = Model("nnx", start_nnx, nnx_loss, draw_tokens)
EQUINOX = Model("equinox", start_equinox, equinox_loss, draw_signals)
MODELS = (PYTREE, LINEN, NNX, EQUINOX)
