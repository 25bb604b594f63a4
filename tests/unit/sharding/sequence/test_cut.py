"""A sequence that is cut over devices: attention is found, and heads are cut there."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.jaxpr import inline_all
from zinf.core.sharding import Dim, axis_rule, batch_layouts
from zinf.core.sharding.axes.sequence import along_sequence
from zinf.core.sharding.mesh import SEQ, make_mesh
from zinf.core.topology import collectives_of
from zinf_kernels.attention import attention as fused_attention

PARTS, LENGTH, WIDTH = 4, 16, 8


def rule(parts=PARTS):
    mesh = make_mesh(jax.devices()[:8], num_seq=parts)
    return axis_rule(mesh, stage=0, min_bytes=0)


def products(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def equation(q, k, v, **operands):
    options = {"causal": True, "implementation": "blocks"}
    return fused_attention(q, k, v, **options, **operands)


def attention(heads, kv_heads, attend=products):
    """A loss with one attention, and its parameters."""

    def loss(p, batch):
        x = batch["x"]
        shape = *x.shape[:2], -1, WIDTH
        q, k, v = ((x @ p[n]).reshape(shape) for n in "qkv")
        y = attend(q, k, v, **{n: batch[n] for n in batch if n != "x"})
        return jnp.mean(jnp.square(x + y.reshape(*x.shape[:2], -1) @ p["o"]))

    wide, narrow = heads * WIDTH, kv_heads * WIDTH
    shapes = {"q": (wide, wide), "k": (wide, narrow), "v": (wide, narrow)}
    return loss, normals(shapes | {"o": (wide, wide)})


def normals(shapes):
    random = np.random.default_rng(0)
    return {n: random.standard_normal(s, np.float32) / 8 for n, s in shapes.items()}


def batch_of(width, **more):
    return normals({"x": (4, LENGTH, width)}) | more


# Two samples in each row.
SEGMENTS = np.tile(np.int32(np.arange(LENGTH) > 5), (4, 1))


def constraints(loss, *arguments):
    """How often each dim is cut along `seq` by the constraints of a loss."""
    graph = inline_all(jax.make_jaxpr(along_sequence(loss, rule()))(*arguments))
    found = Counter()
    for equation in graph.equations:
        if equation.primitive.name == "sharding_constraint":
            spec = equation.params["sharding"].spec
            found[next(d for d, axes in enumerate(spec) if SEQ in (axes or ()))] += 1
    return dict(found)


def compiled(loss, params, batch):
    """The gradient, compiled with whole parameters and a batch that is cut."""
    shapes = {n: x.shape for n, x in batch.items()}
    forms = {n: x.device for n, x in batch_layouts(shapes, rule()).items()}
    whole = NamedSharding(rule().mesh, PartitionSpec())
    gradient = jax.value_and_grad(along_sequence(loss, rule()))
    return jax.jit(gradient, in_shardings=(whole, forms), out_shardings=whole).lower(
        params, batch
    ).compile(), (jax.device_put(params, whole), jax.device_put(batch, forms))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "kv_heads", "more"),
    [
        (products, 8, {}),
        (equation, 8, {}),
        (equation, 2, {}),
        (equation, 8, {"q_segments": SEGMENTS}),
    ],
)
def test_all_to_alls_replace_gathers_around_attention(attend, kv_heads, more):
    loss, params = attention(8, kv_heads, attend)
    batch = batch_of(64, **more)
    run, arguments = compiled(loss, params, batch)
    kinds = Counter(c.kind for c in collectives_of(run) for _ in range(c.times))
    # Query, key, value and result, forward and backward.
    assert kinds["all-to-all"] == 8
    # Segments are gathered once, and no mask of a pair of blocks.
    assert kinds["all-gather"] == len(more)
    found, wanted = run(*arguments), jax.value_and_grad(loss)(params, batch)
    # Sums of 4096 terms, in another order.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "found"),
    [
        # Each of four values twice: positions and heads.
        (8, 4, 8),
        # Six are padded to eight.
        (6, 6, 8),
        # Fewer heads than devices: of products keys and values are gathered.
        (8, 2, 0),
        (6, 2, 0),
    ],
)
@pytest.mark.parametrize("attend", [products, equation])
def test_heads_are_cut_if_there_are_enough_of_them(heads, kv_heads, found, attend):
    loss, params = attention(heads, kv_heads, attend)
    if attend is equation and (heads, kv_heads) == (8, 2):
        found = 8  # Two copies of each.
    cuts = constraints(loss, params, batch_of(WIDTH * heads))
    assert sum(cuts.values()) == found
    assert not found or cuts[1] == 4


@pytest.mark.parametrize("attend", [products, equation])
def test_attention_is_found_in_loops_and_under_checkpoint(attend):
    loss, params = attention(8, 8, attend)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)

    def deep(params, batch):
        def layer(x, p):
            return x + jax.checkpoint(loss)(p, {"x": x}), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params)[0])

    text = str(jax.make_jaxpr(along_sequence(deep, rule()))(stacked, batch_of(64)))
    assert text.count("sharding_constraint[") == 8


def test_the_attention_of_flax_is_found():
    module = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(p, batch):
        return jnp.mean(nnx.merge(graphdef, p, rest)(batch["x"]))

    assert sum(constraints(loss, params, batch_of(32)).values()) == 8


def test_tokens_with_their_labels_are_cut_where_they_are_sliced():
    def loss(p, batch):
        tokens = batch["tokens"]
        x = jnp.take(p["table"], tokens[:, :-1], axis=0)
        logits = jax.nn.log_softmax(x @ p["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    params = {"table": jnp.ones((32, 8))}
    tokens = {"tokens": jnp.zeros((4, LENGTH + 1), jnp.int32)}
    assert constraints(loss, params, tokens)[1] >= 3
    layout = batch_layouts({"tokens": (4, LENGTH + 1)}, rule())["tokens"]
    assert layout.device_shape == (2, LENGTH + 1)
    layout = batch_layouts({"tokens": (4, LENGTH)}, rule())["tokens"]
    assert layout.device_shape == (2, LENGTH // PARTS)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (8, 22)}, "x has 22 positions, which mesh.seq = 4 devices"),
        ({"x": (8,), "y": ()}, r"mesh.seq = 4 .* no leaf has any: x \[8\], y \[\]"),
        ({}, "it has no leaves"),
        ({"x": (7, 16)}, "x has 7 examples .* 2 data-parallel devices"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_by_name(shapes, message):
    with pytest.raises(ValueError, match=message):
        batch_layouts(shapes, rule())


def test_leaves_of_other_lengths_keep_their_dims_whole():
    shapes = {"tokens": (4, 33), "classes": (4, 10), "weights": (4, 32), "n": ()}
    found = {n: x.device_shape for n, x in batch_layouts(shapes, rule()).items()}
    whole = {"tokens": (2, 33), "classes": (2, 10), "n": ()}
    assert found == whole | {"weights": (2, 8)}


def test_state_is_divided_among_devices_with_other_positions_too():
    made = rule()
    assert made.axes(Dim.ROWS) == ("fsdp", "seq")
    assert made.num_shards == 8
    # Without a sequence axis a loss is itself.
    loss, _ = attention(8, 8)
    assert along_sequence(loss, rule(1)) is loss
