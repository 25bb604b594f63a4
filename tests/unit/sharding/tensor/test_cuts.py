"""Which weights devices divide, and along which dim, is seen in the program."""

import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.unit.sharding.tensor import merged
from zinf.core.segment import trace_loss
from zinf.core.sharding import Dim, axis_rule
from zinf.core.sharding.axes.tensor import along_tensor, channel_leaves, find_cuts
from zinf.core.sharding.mesh import make_mesh
from zinf.models import GPTConfig, init_and_loss

HEADS, WIDTH, DIM, HIDDEN = 8, 4, 32, 64
X = {"x": jax.ShapeDtypeStruct((4, 16, DIM), jnp.float32)}


def source_of(loss, params, batch=X):
    make = params if callable(params) else lambda: params
    return trace_loss(loss, jax.eval_shape(make), batch, max_remat_bytes=1 << 60)


def cuts_of(loss, params, parts=4, batch=X, **options):
    source = source_of(loss, params, batch)
    return find_cuts(source.graph, source.params, parts, **options)


def zeros(**shapes):
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def mlp(p, batch):
    hidden = jax.nn.gelu(batch["x"] @ p["up"] + p["bias"][None, None])
    return jnp.mean((hidden @ p["down"] + p["last"][None, None]) ** 2)


MLP = zeros(up=(DIM, HIDDEN), bias=(HIDDEN,), down=(HIDDEN, DIM), last=(DIM,))


MLP_DIMS = {"up": 1, "bias": 0, "down": 0}


def rule(parts):
    mesh = make_mesh(jax.devices()[:parts], num_tensor=parts)
    return axis_rule(mesh, stage=0, min_bytes=0)


def attention(p, batch):
    x = batch["x"]
    q, k, v = ((x @ p[n]).reshape(*x.shape[:2], -1, WIDTH) for n in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.mean((x + y.reshape(*x.shape[:2], -1) @ p["o"]) ** 2)


def attention_weights(kv_heads, heads=HEADS):
    wide, narrow = heads * WIDTH, kv_heads * WIDTH
    return zeros(q=(DIM, wide), k=(DIM, narrow), v=(DIM, narrow), o=(wide, DIM))


def test_an_mlp_is_cut_by_columns_and_then_by_rows():
    assert cuts_of(mlp, MLP).dims == MLP_DIMS


def test_an_attention_is_cut_by_heads():
    found = cuts_of(attention, attention_weights(kv_heads=4))
    assert found.dims == {"q": 1, "k": 1, "v": 1, "o": 0}
    assert not found.reasons


@pytest.mark.parametrize(("heads", "kv_heads", "few"), [(8, 2, 2), (6, 6, 6)])
def test_heads_that_devices_cannot_divide_stay_whole(heads, kv_heads, few):
    found = cuts_of(attention, attention_weights(kv_heads, heads))
    assert found.dims == {}
    assert f"{few} entries of a value" in found.reasons["q"]
    assert found.uneven == ("k", "o", "q", "v")
    source = source_of(attention, attention_weights(kv_heads, heads))
    message = rf"mesh.tensor = 4 .* {few} entries of a value .* do not divide by 4"
    with pytest.raises(ValueError, match=message):
        channel_leaves(source.graph, source.params, rule(4))
    assert channel_leaves(source.graph, source.params, rule(1)) == {}


def test_weights_that_another_number_could_divide_are_named_in_a_warning(caplog):
    def both(p, batch):
        return mlp(p, batch) + attention(p, batch)

    source = source_of(both, {**MLP, **attention_weights(6, 6)})
    found = channel_leaves(source.graph, source.params, rule(4))
    assert found == {path: {d: Dim.CHANNELS} for path, d in MLP_DIMS.items()}
    assert "mesh.tensor = 4 does not divide k, o, q, v" in caplog.text


def joined(p, batch):
    """One weight for query, key and value."""
    parts = jnp.split(batch["x"] @ p["up"], 3, axis=-1)
    own = dict(zip("qkv", (jnp.eye(DIM),) * 3, strict=True))
    x = sum(parts[n] @ own[name] for n, name in enumerate("qkv"))
    return jnp.mean((x @ p["down"]) ** 2)


def normed(p, batch):
    hidden = jax.nn.standardize(batch["x"] @ p["up"])
    return jnp.mean((hidden @ p["down"]) ** 2)


def tied(p, batch):
    """A weight that is read along both dims."""
    hidden = jnp.tanh(batch["x"] @ p["up"]) * (batch["x"] @ p["up"].T)
    return jnp.mean((hidden @ p["down"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "hidden", "inner", "path", "reason"),
    [
        (joined, 3 * DIM, DIM, "up", "`split` along rows"),
        (normed, HIDDEN, HIDDEN, "down", "a sum over it by `reduce_sum`"),
        (tied, DIM, DIM, "up", "cut along two dims"),
    ],
)
def test_values_that_must_be_whole_keep_their_weights_whole(
    loss, hidden, inner, path, reason
):
    found = cuts_of(loss, zeros(up=(DIM, hidden), down=(inner, DIM)))
    assert "up" not in found.dims
    assert reason in found.reasons[path]


def test_small_weights_around_which_a_sum_would_not_pay_stay_whole():
    rank = 8

    def adapted(p, batch):
        x = batch["x"]
        hidden = jnp.tanh(x @ p["up"] + (x @ p["a"]) @ p["b"])
        return jnp.mean((hidden @ p["down"]) ** 2)

    big = {"up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    params = zeros(**big, a=(DIM, rank), b=(rank, HIDDEN))
    found = cuts_of(adapted, params, min_bytes=4 * DIM * HIDDEN)
    # The columns of b are added to those of up. Its rows are no larger than a.
    assert found.dims == {"up": 1, "b": 1, "down": 0}
    assert "persistence_threshold" in found.reasons["a"]
    nothing = cuts_of(adapted, params, min_bytes=4 * DIM * HIDDEN + 1)
    assert nothing.dims == {}


def test_of_two_ways_the_one_with_more_weights_is_taken():
    # Flax keeps heads and their width as two dims; only values can be cut by width.
    module = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(p, batch):
        return jnp.mean(nnx.merge(graphdef, p, rest)(batch["x"]) ** 2)

    found = cuts_of(loss, nnx.to_pure_dict(params)).dims
    kernels = {path: dim for path, dim in found.items() if path.endswith("kernel")}
    assert kernels == {
        "query/kernel": 1,
        "key/kernel": 1,
        "value/kernel": 1,
        "out/kernel": 0,
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_of_a_gpt_are_cut_in_loops_and_under_checkpoint(stacked):
    config = GPTConfig(
        num_layers=3,
        num_heads=4,
        embed_dim=16,
        vocab_size=32,
        max_length=8,
        scan_layers=stacked,
        remat=stacked,
    )
    init, loss = init_and_loss(config, seed=0)
    batch = {"tokens": jax.ShapeDtypeStruct((2, 9), jnp.int32)}
    found = cuts_of(loss, init, batch=batch).dims
    kernels = Counter(
        (path.rsplit("/", 2)[1], dim - stacked)
        for path, dim in found.items()
        if path.endswith("kernel")
    )
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    wanted = {(name, 1) for name in columns} | {(name, 0) for name in rows}
    assert kernels == dict.fromkeys(wanted, 1 if stacked else 3)


def in_layers(layer):
    """A loss of two layers in a scan, whose weights are stacked."""

    def loss(p, batch):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), batch["x"], p)
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize(
    ("loss", "stacked"),
    [
        (merged.loss, ()),
        (jax.checkpoint(merged.loss), ()),
        (in_layers(merged.layer), (2,)),
        (in_layers(jax.checkpoint(merged.layer)), (2,)),
    ],
    ids=["plain", "checkpoint", "scan", "both"],
)
def test_heads_that_are_joined_with_examples_are_kept_apart_and_cut(loss, stacked):
    random = np.random.default_rng(0)
    params = {
        name: random.standard_normal((*stacked, *shape), np.float32) / DIM**0.5
        for name, shape in merged.shapes(DIM).items()
    }
    joined = cuts_of(loss, params)
    why = r"`reshape` from \[4, 8, 16, 4\] to \[32, 16, 4\]"
    assert joined.dims.keys() == {"up", "down"}
    assert re.search(why, joined.reasons["qkv"])
    apart = along_tensor(loss, rule(4))
    found = cuts_of(apart, params)
    assert found.dims == {n: d + len(stacked) for n, d in merged.DIMS.items()}
    batch = {"x": random.standard_normal(X["x"].shape, np.float32)}
    results = (jax.jit(jax.value_and_grad(f))(params, batch) for f in (apart, loss))
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def over_all(p, batch):
    """A product of examples with heads of others: they cannot be kept apart."""
    count, length, dim = batch["x"].shape
    y = (batch["x"] @ p["up"]).reshape(count, length, -1, WIDTH).swapaxes(1, 2)
    y = y.reshape(-1, length, WIDTH)
    y = jnp.einsum("ntd,mtd->nm", y, y) @ y.reshape(-1, length * WIDTH)
    y = y.reshape(count, -1, length, WIDTH).swapaxes(1, 2)
    return jnp.mean((y.reshape(count, length, -1) @ p["down"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "params"),
    [
        (mlp, MLP),
        (attention, attention_weights(kv_heads=4)),
        (over_all, zeros(up=(DIM, DIM), down=(DIM, DIM))),
        # Four devices do not divide six heads.
        (merged.loss, zeros(**merged.shapes(6 * WIDTH))),
    ],
)
def test_programs_of_which_no_more_could_be_cut_stay(loss, params):
    dim, *_ = next(iter(params.values())).shape
    batch = {"x": jax.ShapeDtypeStruct((4, 16, dim), jnp.float32)}
    programs = [
        str(source_of(f, params, batch).graph.equations)
        for f in (loss, along_tensor(loss, rule(4)), along_tensor(loss, rule(1)))
    ]
    assert programs[0] == programs[1] == programs[2]
