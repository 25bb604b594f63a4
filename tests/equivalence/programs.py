"""Small losses, one for each thing that a user's program may contain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zinf.models import GPTConfig
from zinf.models.gpt_functions import init_and_loss
from zinf.moe import experts, top_k

DIM, BATCH, LAYERS = 8, 4, 3
Tree = Any


@dataclass(frozen=True)
class Program:
    """A loss with its parameters, and the arguments of `zinf.initialize` it needs."""

    name: str
    init: Callable[[], Tree]
    loss: Callable[..., Any]
    batch: Tree
    config: dict[str, Any] = field(default_factory=dict)
    uses_key: bool = False
    has_aux: bool = False
    frozen: Sequence[str] = ()
    without_gradient: Sequence[str] = ()  # glob patterns
    # Fewer segments than this, and the test would show little.
    min_segments: int = LAYERS

    @property
    def num_microbatches(self) -> int:
        return self.config.get("gradient_accumulation_steps", 1)

    def mean_loss(self, params: Tree, key: jax.Array, step: int) -> jax.Array:
        """The loss of a step over its microbatches, which zinf gives keys of theirs."""
        count = self.num_microbatches
        key, losses = jax.random.fold_in(key, step), []
        for m in range(count):
            own = key if count == 1 else jax.random.fold_in(key, m)
            rows = jax.tree.map(partial(rows_of, m=m, count=count), self.batch)
            result = self.loss(params, rows, *([own] if self.uses_key else []))
            losses.append(result[0] if self.has_aux else result)
        return sum(losses) / count


def rows_of(leaf: Any, m: int, count: int) -> jax.Array:
    return jnp.asarray(np.split(leaf, count)[m] if np.ndim(leaf) else leaf)


PROGRAMS: list[Program] = []


def program(init: Callable[[], Tree], batch: Tree = None, **options: Any) -> Callable:
    """Adds the loss below it to PROGRAMS."""

    def add(loss: Callable) -> Callable:
        data = VECTORS if batch is None else batch
        PROGRAMS.append(Program(loss.__name__, init, loss, data, **options))
        return loss

    return add


def each_layer(init: Callable[[], Tree] | None = None, **options: Any) -> Callable:
    """Adds the loss of layers that are each `(p, x, params, i) -> x`."""

    def add(layer: Callable) -> Callable:
        def loss(params: Tree, batch: Tree) -> jax.Array:
            x = batch["x"]
            for i, p in enumerate(params["layers"]):
                x = layer(p, x, params, i)
            return mse(x, batch)

        loss.__name__ = layer.__name__
        return program(init or layers(), **options)(loss)

    return add


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


VECTORS = {"x": normal(1, BATCH, DIM), "y": normal(2, BATCH, DIM)}
TOKENS = {"tokens": np.random.default_rng(3).integers(0, 16, (BATCH, 7), np.int32)}
SERIES = {"x": normal(4, BATCH, 6, DIM), "y": normal(5, BATCH, DIM)}


def weight(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * shape[0] ** -0.5


def layers(**extra: Callable[[], Any]) -> Callable[[], Tree]:
    def init() -> Tree:
        many = [
            {"w": weight(i, DIM, DIM), "b": jnp.full((1, DIM), 0.1)}
            for i in range(LAYERS)
        ]
        return {"layers": many, **{name: make() for name, make in extra.items()}}

    return init


def stacked(**extra: Callable[[], Any]) -> Callable[[], Tree]:
    def init() -> Tree:
        w = jnp.stack([weight(i, DIM, DIM) for i in range(LAYERS)])
        return {"w": w, **{name: make() for name, make in extra.items()}}

    return init


def dense(p: Tree, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def block(p: Tree, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(dense(p, x))


def blocks(many: Sequence[Tree], x: jax.Array) -> jax.Array:
    for p in many:
        x = block(p, x)
    return x


def mse(x: jax.Array, batch: Tree) -> jax.Array:
    return jnp.mean(jnp.square(x - batch["y"]))


# Randomness.


@program(layers(), uses_key=True, config={"gradient_accumulation_steps": 2})
def dropout_with_microbatches(params, batch, key):
    x = batch["x"]
    for i, p in enumerate(params["layers"]):
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
        x = x + jnp.where(keep, jnp.tanh(dense(p, x)) / 0.8, 0.0)
    return mse(x, batch)


@program(layers(), uses_key=True)
def a_chain_of_split_keys(params, batch, key):
    x = batch["x"]
    for p in params["layers"]:
        key, own = jax.random.split(key)
        x = x + jnp.tanh(dense(p, x)) * jax.random.uniform(own, x.shape)
    return mse(x, batch)


@program(
    stacked(),
    uses_key=True,
    config={"activation_checkpointing": {"cpu_checkpointing": True}},
)
def keys_scanned_along_with_layers(params, batch, key):
    def layer(x, row):
        w, own = row
        return x + jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.7, x.shape), None

    keys = jax.random.split(key, LAYERS)
    return mse(lax.scan(layer, batch["x"], (params["w"], keys))[0], batch)


TABLE = normal(8, DIM, DIM)
SCALE = jnp.float32(0.3)


@each_layer()
def keys_and_constants_that_the_loss_closes_over(p, x, params, i):
    noise = jax.random.normal(jax.random.key(i), x.shape)
    return block(p, x @ TABLE * SCALE + 0.1 * noise)


# Parameters.


def embedded() -> Tree:
    return {**layers()(), "embed": weight(9, 16, DIM)}


@program(embedded, TOKENS)
def tied_embeddings(params, batch):
    tokens = batch["tokens"]
    x = params["embed"][tokens[:, :-1]]
    for p in params["layers"]:
        x = x + jnp.tanh(x @ p["w"] + p["b"][None])
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


@program(
    layers(steps=lambda: jnp.int32(2), mask=lambda: jnp.arange(DIM) % 2 == 0),
    config={"frozen": ["layers/1/*"]},
    frozen=["layers/1/w", "layers/1/b", "steps", "mask"],
)
def frozen_leaves_of_several_kinds(params, batch):
    x = blocks(params["layers"], batch["x"])
    return mse(jnp.where(params["mask"][None], x, x * params["steps"]), batch)


@program(
    layers(
        unused=lambda: jnp.ones((2, 3)),
        noted=lambda: jnp.ones(3),
        none=lambda: jnp.ones((DIM, 0)),
    ),
    has_aux=True,
    without_gradient=["unused", "noted", "none"],
)
def parameters_that_are_unused_or_without_entries(params, batch):
    x = blocks(params["layers"], batch["x"])
    return mse(x, batch) + params["none"].sum(), params["noted"].sum()


@each_layer(
    layers(
        shared=lambda: weight(7, DIM, DIM),
        shift=lambda: jnp.float32(0.1),
        scale=lambda: jnp.ones(()),
    )
)
def scalars_and_a_matrix_in_every_layer(p, x, params, i):
    return params["scale"] * block(p, x @ params["shared"]) + params["shift"]


@program(layers())
def parameters_cast_at_the_top(params, batch):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = batch["x"].astype(jnp.bfloat16)
    for p in params["layers"]:
        x = block(p, x)
    return mse(x.astype(jnp.float32), batch)


@program(stacked())
def stacked_parameters_cast_at_the_top(params, batch):
    rows = params["w"].astype(jnp.bfloat16)
    x, _ = lax.scan(
        lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"].astype(rows.dtype), rows
    )
    return mse(x.astype(jnp.float32), batch)


@program(stacked())
def rows_of_a_stack_in_a_python_loop(params, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params["w"][i])
    return mse(x, batch)


def nested_stacks() -> Tree:
    w = jnp.stack([weight(i, DIM, DIM) for i in range(2 * LAYERS)])
    kinds = jnp.arange(LAYERS, dtype=jnp.int32)
    scales = jnp.arange(1.0, LAYERS + 1)
    return {"w": w.reshape(LAYERS, 2, DIM, DIM), "scale": scales, "kind": kinds}


@program(nested_stacks, frozen=["kind"])
def stacks_of_stacks_numbers_and_integers(params, batch):
    def group(x, row):
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, row["w"])
        x = lax.switch(row["kind"], [jnp.tanh, jnp.sin, jax.nn.relu], x)
        return x * row["scale"], None

    return mse(lax.scan(group, batch["x"], params)[0], batch)


@each_layer()
def weights_normalised_before_use(p, x, params, i):
    w = p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)
    return x + jnp.tanh(x @ w + p["b"])


# Derivatives.


@program(layers(), config={"segment": {"max_bytes": 300}})
def checkpointed_pairs_larger_than_a_segment(params, batch):
    policy = jax.checkpoint_policies.dots_saveable
    x = jax.checkpoint(blocks, policy=policy)(params["layers"], batch["x"])
    return mse(x, batch)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda xs, ts: (jnp.clip(*xs, -1, 1), 0.5 * ts[0]))


@each_layer()
def custom_rules_in_every_layer(p, x, params, i):
    return x + straight_through(4 * dense(p, x)) / 4 + clipped(dense(p, x))


def scaled_gradient(factor: float) -> Callable:
    """Equal code forward, and nothing but the derivative rule tells them apart."""

    @jax.custom_vjp
    def identity(x):
        return jnp.sin(x)

    identity.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (factor * g,))
    return identity


@each_layer()
def custom_rules_that_differ_between_equal_layers(p, x, params, i):
    return x + scaled_gradient(1.0 + i)(dense(p, x))


@each_layer()
def custom_rules_under_checkpoint(p, x, params, i):
    rule = scaled_gradient(1.0 + i)
    return x + jax.checkpoint(lambda p, x: rule(dense(p, x)))(p, x)


@each_layer()
def stopped_gradients(p, x, params, i):
    return block(p, x) + lax.stop_gradient(jnp.sin(x @ p["w"]))


@program(layers())
def a_penalty_on_gradients_of_the_network(params, batch):
    def network(x):
        return blocks(params["layers"], x).sum()

    return jnp.mean(jnp.square(jax.grad(network)(batch["x"]) - batch["y"]))


# Control flow.


@program(stacked())
def scan_over_layers_in_reverse(params, batch):
    def layer(x, w):
        x = x + jnp.tanh(x @ w)
        return x, x.mean()

    x, means = lax.scan(layer, batch["x"], params["w"], reverse=True)
    return mse(x, batch) + jnp.dot(means, jnp.arange(3.0))


@program(stacked())
def scan_of_checkpointed_layers(params, batch):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
    return mse(lax.scan(layer, batch["x"], params["w"])[0], batch)


def rnn_params() -> Tree:
    return [
        {"w": weight(i, DIM, DIM), "u": weight(i + 5, DIM, DIM)} for i in range(LAYERS)
    ]


@program(rnn_params, SERIES)
def recurrent_layers(params, batch):
    x = batch["x"].swapaxes(0, 1)
    for p in params:

        def cell(h, x, p=p):
            h = jnp.tanh(x @ p["w"] + h @ p["u"])
            return h, h

        _, x = lax.scan(cell, jnp.zeros((BATCH, DIM)), x)
    return mse(x[-1], batch)


@each_layer()
def loops_and_branches_in_every_layer(p, x, params, i):
    halves = lax.while_loop(lambda n: n < 5, lambda n: n * 2, jnp.int32(1))
    x = lax.fori_loop(0, 2, lambda _, x: block(p, x), x)
    x = lax.cond(x.sum() > 0, lambda x: x, lambda x: 0.5 * x, x) / halves
    return lax.switch(jnp.int32(i), [jnp.tanh, jnp.sin, jax.nn.relu], x)


# Shapes of networks.


GPT_INIT, GPT_LOSS = init_and_loss(
    GPTConfig(
        num_layers=LAYERS,
        num_heads=2,
        embed_dim=DIM,
        vocab_size=16,
        max_length=8,
        use_bias=False,
        scan_layers=True,
    ),
    seed=0,
)


@program(GPT_INIT, TOKENS)
def an_nnx_module_with_scanned_layers(params, batch):
    return GPT_LOSS(params, batch)


@each_layer()
def post_norm_blocks(p, x, params, i):
    return jax.nn.standardize(x + jnp.tanh(dense(p, x)))


def two_stacks() -> Tree:
    decoder = [
        {"w": weight(i + 4, DIM, DIM), "c": weight(i + 8, DIM, DIM)}
        for i in range(LAYERS)
    ]
    return {"encoder": layers()()["layers"], "decoder": decoder}


@program(two_stacks, min_segments=2 * LAYERS)
def an_encoder_and_a_decoder(params, batch):
    memory = batch["x"]
    for p in params["encoder"]:
        memory = block(p, memory)
    x = jnp.ones_like(memory)
    for p in params["decoder"]:
        x = jnp.sin(x @ p["w"] + memory @ p["c"])
    return mse(x, batch)


@program(layers())
def values_carried_across_layers(params, batch):
    """A U-net: the first layer's output is read by the last."""
    x, kept = batch["x"], []
    for p in params["layers"]:
        kept.append(x)
        x = jnp.tanh(dense(p, x))
    for p in params["layers"]:
        x = jnp.tanh(dense(p, x)) + kept.pop()
    return mse(x, batch)


def conv_params() -> Tree:
    shapes = [(3, 3, 1, 4), (3, 3, 4, 6), (1, 1, 6, 8)]
    convs = [0.3 * normal(i, *s) for i, s in enumerate(shapes)]
    return {"convs": convs, "out": weight(5, 8, 3)}


IMAGES = {"x": normal(6, BATCH, 8, 8, 1), "y": normal(7, BATCH, 3)}


@program(conv_params, IMAGES, config={"segment": {"max_bytes": 1000}})
def a_conv_net_without_repetition(params, batch):
    x = batch["x"]
    for i, w in enumerate(params["convs"]):
        dims = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x, w, (1 + i % 2,) * 2, "SAME", dimension_numbers=dims
        )
        x = jax.nn.relu(x)
    return mse(x.mean((1, 2)) @ params["out"], batch)


@each_layer()
def spectra_in_every_layer(p, x, params, i):
    """Complex values between real parameters and a real loss."""
    return x + jnp.tanh(jnp.fft.ifft(jnp.fft.fft(dense(p, x)) * (1 + 1j)).real)


@each_layer(layers(router=lambda: weight(3, DIM, 4)))
def experts_chosen_by_a_router(p, x, params, i):
    """Integers that depend on parameters decide where values go."""
    best, index = lax.top_k(jax.nn.softmax(x @ params["router"]), 1)
    order = jnp.argsort(index[:, 0])
    return x + best * block(p, x[order])[jnp.argsort(order)]


EXPERTS = 4


def with_experts() -> Tree:
    many = [
        {
            "router": weight(20 + i, DIM, EXPERTS),
            "up": weight(30 + i, EXPERTS, DIM, 6) * 2,
            "down": weight(40 + i, EXPERTS, 6, DIM),
        }
        for i in range(LAYERS)
    ]
    return {"layers": many}


def one_expert(p: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["up"]) @ p["down"]


def routed_loss(params: Tree, batch: Tree, splits: int) -> jax.Array:
    x, balance = batch["x"], 0.0
    for p in params["layers"]:
        routing = top_k(x @ p["router"], 2, capacity=3)
        weights = {"up": p["up"], "down": p["down"]}
        routes = routing.choice, routing.gate
        x += experts(one_expert, weights, x, *routes, block=2, splits=splits)
        balance += routing.aux_loss
    return mse(x, batch) + 0.01 * balance


@program(with_experts)
def experts_of_every_layer(params, batch):
    """`zinf.moe`: dropped routes, a balancing loss, a loop with its own derivative."""
    return routed_loss(params, batch, splits=1)


@program(with_experts)
def experts_fetched_in_pieces(params, batch):
    return routed_loss(params, batch, splits=2)


def create_haiku(x):
    for _ in range(LAYERS):
        x = x + hk.Linear(DIM)(jnp.tanh(x))
    return x


HAIKU = hk.without_apply_rng(hk.transform(create_haiku))


@program(lambda: HAIKU.init(jax.random.key(0), VECTORS["x"]))
def a_haiku_transform(params, batch):
    return mse(HAIKU.apply(params, batch["x"]), batch)


# Inputs and outputs.


@program(layers(), has_aux=True)
def aux_outputs_of_all_kinds(params, batch):
    x, norms = batch["x"], []
    for p in params["layers"]:
        x = block(p, x)
        norms.append(jnp.linalg.norm(x))
    aux = {
        "norms": norms,
        "argmax": x.argmax(-1),
        "input": batch["x"],
        "bias": params["layers"][0]["b"],
        "constant": 3,
        "table": TABLE,
    }
    return mse(x, batch), aux


@program(layers(), {**VECTORS, "scale": np.float32(0.5), "unread": np.ones((BATCH, 2))})
def batch_leaves_that_are_scalars_or_unread(params, batch):
    x = batch["x"] * batch["scale"]
    for p in params["layers"]:
        x = block(p, x)
    return mse(x, batch)


@each_layer()
def debug_prints(p, x, params, i):
    jax.debug.callback(partial(list.append, []), x.sum())
    return block(p, x)


@program(lambda: {"a": jnp.float32(2.0)}, min_segments=1)
def a_loss_that_is_a_parameter(params, batch):
    return params["a"]


@program(layers(), min_segments=1, without_gradient=["*"])
def a_loss_without_a_gradient(params, batch):
    return mse(batch["x"], batch) + 0 * lax.stop_gradient(
        params["layers"][0]["w"].sum()
    )
