"""A backward pass from residuals gives what recomputing gives, and runs less."""

from dataclasses import replace
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.segment.on_one import compiled_on
from zinf.core.jaxpr import abstract
from zinf.core.segment import segment_loss, trace_loss
from zinf.core.segment.flops import equation_flops
from zinf.core.segment.leaves import array_spec
from zinf.models.gpt_config import GPTConfig
from zinf.models.gpt_functions import init_and_loss

WIDTH = 16
CPU = jax.devices("cpu")[0]
SMALL = {"num_layers": 3, "num_heads": 2, "embed_dim": 16, "max_length": 8}
# Wide and long enough that no product is cheap for its size but those of scores.
LARGE = SMALL | {"embed_dim": 144, "num_heads": 4, "max_length": 144}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
GPT2 = GPTConfig(**SMALL)
DROPOUT = GPTConfig(**SMALL, dropout=0.3)
WITH_GATE = GPTConfig(**SMALL, **LLAMA, use_bias=False, num_kv_heads=1)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def segments_of(loss, params, batch, *, key=None, frozen=(), **limits):
    """`(program, segments)` of a loss over specs."""
    limits = {"max_remat_bytes": 0, "max_bytes": None} | limits
    remat_bytes = limits.pop("max_remat_bytes")
    source = trace_loss(loss, params, batch, key=key, max_remat_bytes=remat_bytes)
    cut = segment_loss(source, frozen=frozen, splittable=(), **limits)
    return cut.program, compiled_on(CPU, cut)


@cache
def gpt(config, dtype="float32"):
    """`(program, segments)` of a GPT, a layer each."""
    init, loss = init_and_loss(config, seed=0)
    params = jax.tree.map(lambda p: spec(*p.shape, dtype=dtype), jax.eval_shape(init))
    batch = {"tokens": spec(2, config.max_length + 1, dtype=jnp.int32)}
    return segments_of(loss, params, batch, key=KEY if config.dropout else None)


def random(array, rng):
    if "int" in array.dtype:  # also words of a random key
        return jnp.asarray(rng.integers(0, 8, array.shape), array.dtype)
    return jnp.asarray(rng.normal(size=array.shape) / 3, array.dtype)


def arguments_of(program, segment):
    """`(params, those read backward, inputs, cotangents)` of a segment, at random."""
    rng = np.random.default_rng(0)
    leaves = {leaf.path: leaf.array_spec() for leaf in program.leaves}
    params = {a: random(leaves[a.path], rng) for a in segment.spec.params}
    inputs, cotangents = (
        [random(program.values[n], rng) for n in names]
        for names in (segment.spec.inputs, segment.spec.active_outputs)
    )
    read = [params[a] for a in segment.spec.params if a in segment.spec.read_backward]
    return list(params.values()), read, inputs, cotangents


def selective(segment):
    return replace(segment, is_selective=True)


def check(program, segment, *, bound=1e-5):
    """Compares both ways of running a segment; `bound` is relative to the norm.

    In float32 most gradients are equal to the last bit; 1e-5, some 80 ulps, leaves XLA
    free to fuse the passes differently.
    """
    params, read, inputs, cotangents = arguments_of(program, segment)
    outputs, residuals = segment.forward_keeping(params, inputs)
    assert tuple(map(array_spec, residuals)) == segment.residuals()
    found = segment.backward_from(read, inputs, residuals, cotangents)
    wanted = segment.backward(read, inputs, cotangents)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert len(found[0]) == sum(segment.spec.trainable)
    assert len(found[1]) == len(segment.spec.active_inputs)
    for y, x in zip(outputs, segment.forward(params, inputs), strict=True):
        assert_close(y, x, bound * norm(x))
    paths = [a.path for a in segment.spec.trained_params] + ["input"] * len(found[1])
    gradients = dict(zip(paths, wanted[0], strict=False))
    for path, y, x in zip(paths, sum(found, []), sum(wanted, []), strict=True):
        # A bias of all keys shifts each row of scores, which softmax does not see. Its
        # gradient is rounding alone, of a sum with terms as large as the query bias'.
        of_queries = gradients.get(path.replace("key/bias", "query/bias"), x)
        assert_close(y, x, bound * norm(of_queries))
    return residuals


def assert_close(found, wanted, error):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert norm(np.float64(found) - np.float64(wanted)) <= error


def norm(array):
    return np.linalg.norm(np.asarray(array, np.float64))


def contractions(equations):
    """The floating-point operations of each matrix product, in order."""
    return [equation_flops(e) for e in equations if e.primitive.name == "dot_general"]


def kept_bytes(segment):
    return sum(r.nbytes for r in segment.residuals())


def test_gradients_from_residuals_are_those_of_recomputing():
    program, (first, layer, *_) = gpt(DROPOUT)
    check(program, layer)
    # The embedding is tied to the head, and its tokens have no cotangent.
    assert first.spec.trained_params[0].path == "token_embedding"
    check(program, first)


@pytest.mark.slow
def test_so_are_those_in_bfloat16_and_those_from_less():
    # XLA drops roundings to bfloat16 inside a fusion; a kept value is rounded. An ulp
    # is 2^-8 of a value; 2.2 were the most between the norms of a GPT 768 wide.
    program, segments = gpt(WITH_GATE, "bfloat16")
    check(program, segments[1], bound=2**-5)
    program, segments = gpt(GPTConfig(**LARGE))
    check(program, selective(segments[1]))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (replace(GPT2, max_length=32), "bfloat16"),
        (DROPOUT, "float32"),
        (WITH_GATE, "float32"),
    ],
    ids=["gpt2", "dropout", "llama"],
)
def test_a_layer_keeps_what_lets_its_backward_pass_run_no_matmul_again(config, dtype):
    segment = gpt(config, dtype)[1][1]
    forward = contractions(segment.keeping.whole.body.jaxpr.eqns)
    assert contractions(segment.keeping.halves.again.equations) == []
    # Each product has two in the backward pass: for either side.
    backward = contractions(segment.keeping.halves.backward.equations)
    assert sum(backward) == 2 * sum(forward)
    # Query, key, value, mixed values, the sum in the middle; the hidden layer. Key and
    # value of a llama have fewer heads, and its hidden layer a gate.
    widths = 5 * config.embed_dim + config.hidden_dim
    # float32: exponentials and their sum for each head; mean and deviation of 2 norms.
    float32s = config.num_heads * (config.max_length + 1) + 4
    if config is WITH_GATE:
        kv_dim = config.kv_heads * config.head_dim
        widths = 3 * config.embed_dim + 2 * kv_dim + 2 * config.hidden_dim
        float32s -= 2
    # Two masks, of one byte each.
    masks = 2 * config.embed_dim * (config is DROPOUT)
    token_bytes = widths * jnp.dtype(dtype).itemsize + 4 * float32s + masks
    assert kept_bytes(segment) == 2 * config.max_length * token_bytes


def test_scores_are_not_kept_but_computed_again_where_less_is_kept():
    config = GPTConfig(**LARGE)
    segment = gpt(config)[1][1]
    layer, tokens, heads = selective(segment), config.max_length, config.num_heads
    scores = (1, 2, heads, tokens, tokens)
    assert scores in {r.shape for r in segment.residuals()}
    assert scores not in {r.shape for r in layer.residuals()}
    flops = 2 * prod(scores) * config.head_dim
    assert contractions(layer.keeping.halves.again.equations) == [flops]
    assert layer.keeping.halves.flops_again == flops
    assert segment.keeping.halves.flops_again == 0
    # Nine widths; the maximum and sum for each head, mean and deviation of two norms.
    widths = 5 * config.embed_dim + config.hidden_dim
    assert kept_bytes(layer) == 2 * tokens * 4 * (widths + 2 * heads + 4)
    # 2 * 144 operations for 4 bytes of a score are too many.
    segment = gpt(replace(config, num_heads=1))[1][1]
    assert selective(segment).residuals() == segment.residuals()


# Small layers: what a segment keeps.

MATRICES = {"layers": [spec(WIDTH, WIDTH)] * 4}
PAIRS = {"layers": [{n: spec(WIDTH, WIDTH) for n in "vw"}] * 4}
X, KEY = spec(4, WIDTH), abstract(jax.random.key(0))


def layered(layer, params=MATRICES, **options):
    """Layers one after the other, then a mean square; a matrix a segment."""

    def loss(params, x, *key):
        for i, p in enumerate(params["layers"]):
            keys = (jax.random.fold_in(*key, i),) if key else ()
            x = layer(p, x, *keys)
        return jnp.mean(x**2)

    return segments_of(loss, params, X, max_bytes=4 * (WIDTH + 1) * WIDTH, **options)


def read_thrice(w, x):
    h = x @ w
    return jnp.sin(h) * jnp.cos(x @ w) + jnp.tanh(h)


def looped(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]


@jax.custom_vjp
def noisy(x, key):
    return x + jax.random.normal(key, x.shape)


noisy.defvjp(
    lambda x, key: (noisy(x, key), jax.random.fold_in(key, 1)),
    lambda key, g: (g * jax.random.normal(key, g.shape), None),
)
TWICE = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
# From jax 0.12 on the backward pass of a scan reads one stack less.
KEPT_IN_A_LOOP = 3 if jax.__version_info__ < (0, 12) else 2
# By name: the layer, the shapes that it keeps, and how it is cut.
CASES = {
    "an argument": (lambda w, x: x @ w, (), {}),
    "cheap steps from an input": (lambda w, x: jnp.exp(jnp.sin(x) * 0.5) @ w, (), {}),
    # What the sine is taken of, and not w @ w.T.
    "of parameters alone": (lambda w, x: jnp.sin(x @ (w @ w.T)), (X.shape,), {}),
    "read thrice, kept once": (read_thrice, (X.shape,), {}),
    # Neither the product with v nor what v multiplies: only tanh has a derivative.
    "frozen": (
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
        (X.shape,),
        {"params": PAIRS, "frozen": [f"layers/{i}/v" for i in range(4)]},
    ),
    "in a loop": (looped, ((3, *X.shape),) * KEPT_IN_A_LOOP, {}),
    "the user rematerialises": (TWICE, (), {"max_remat_bytes": 4 * WIDTH * WIDTH}),
    # Its words, and not the noise that its backward rule draws from it again.
    "a random key": (
        lambda w, x, key: noisy(x @ w, key),
        (array_spec(KEY).shape,),
        {"key": KEY},
    ),
}
SLOW = [pytest.param("a random key", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", [n for n in CASES if n != "a random key"] + SLOW)
def test_a_layer_keeps_only_what_its_backward_pass_cannot_do_without(name):
    layer, kept, options = CASES[name]
    program, segments = layered(layer, **options)
    bodies = {s.spec.body: s for s in segments[:-1] if s.spec.has_backward}
    assert bodies
    for segment in bodies.values():
        residuals = check(program, segment)
        # With `frozen`, v is a segment of its own.
        is_empty = name == "frozen" and not residuals
        assert is_empty or tuple(r.shape for r in residuals) == kept


def test_residuals_are_known_without_compiling_and_executables_are_shared():
    _, segments = layered(lambda w, x: jnp.tanh(x @ w), frozen=["layers/0"])
    # The last segment and one without a backward pass keep nothing.
    without, first, other = segments[0], *segments[2:4]
    assert not without.spec.has_backward and first.spec.body == other.spec.body
    assert without.residuals() == segments[-1].residuals() == ()
    passes = {"forward", "backward"}
    assert first.residuals()
    assert passes.isdisjoint(vars(first.keeping))
    workspace = first.keeping_workspace()
    assert workspace.forward_bytes >= 0 and workspace.backward_bytes >= 0
    assert other.keeping is first.keeping
    assert passes <= set(vars(first.keeping))
    assert passes.isdisjoint(vars(first.executables))
    assert passes.isdisjoint(vars(selective(first).keeping))
