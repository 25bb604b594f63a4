"""A backward pass from residuals gives what recomputing gives, and runs less."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.segment.on_one import compiled_on
from zinf.jaxpr import abstract
from zinf.models.gpt import init_and_loss
from zinf.models.gpt_config import GPTConfig
from zinf.segment import segment_loss, trace_loss
from zinf.segment.build import array_spec
from zinf.segment.flops import equation_flops

WIDTH = 16
CPU = jax.devices("cpu")[0]
SMALL_GPT = {"num_layers": 3, "num_heads": 2, "embed_dim": 16, "max_length": 8}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
# Wide and long enough that no product is cheap for its size but those of scores.
LARGE_GPT = {"embed_dim": 144, "num_heads": 4, "max_length": 144}
MODELS = {
    "gpt2": {},
    "llama": {**LLAMA, "use_bias": False, "num_kv_heads": 1},
    "dropout": {"dropout": 0.3},
}


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def config_of(name, **options):
    return GPTConfig(**{**SMALL_GPT, **MODELS[name], **options})


@cache
def gpt(name, dtype="float32", **options):
    """`(program, segments)` of a GPT, a layer each."""
    config = config_of(name, **options)
    init, loss = init_and_loss(config, seed=0)
    params = jax.tree.map(lambda p: spec(*p.shape, dtype=dtype), jax.eval_shape(init))
    batch = {"tokens": spec(2, config.max_length + 1, dtype=jnp.int32)}
    key = abstract(jax.random.key(0)) if config.dropout else None
    source = trace_loss(loss, params, batch, key=key, has_aux=False, max_remat_bytes=0)
    cut = segment_loss(source, frozen=(), splittable=(), max_bytes=None)
    return cut.program, compiled_on(CPU, cut)


def random(array, rng):
    if array.dtype == "uint32":  # words of a random key
        return jnp.asarray(rng.integers(0, 2**31, array.shape), array.dtype)
    if "int" in array.dtype:
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
        assert_close(y, x, bound)
    paths = [a.path for a in segment.spec.trained_params] + ["input"] * len(found[1])
    gradients = dict(zip(paths, wanted[0], strict=False))
    for path, y, x in zip(paths, sum(found, []), sum(wanted, []), strict=True):
        # A bias of all keys shifts each row of scores, which softmax does not see. Its
        # gradient is rounding alone, of a sum with terms as large as the query bias'.
        of_queries = path.replace("key/bias", "query/bias")
        assert_close(y, x, bound, scale=norm(gradients.get(of_queries, x)))
    return residuals


def assert_close(found, wanted, bound, *, scale=None):
    """The norm of the difference is within `bound` of `scale`, or that of `wanted`."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    scale = norm(wanted) if scale is None else scale
    error = norm(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    assert error <= bound * scale


def norm(array):
    return np.linalg.norm(np.asarray(array, np.float64))


def contractions(equations):
    """The floating-point operations of each matrix product, in order."""
    return [equation_flops(e) for e in equations if e.primitive.name == "dot_general"]


def kept_bytes(segment):
    return sum(r.nbytes for r in segment.residuals())


# XLA drops roundings to bfloat16 inside a fusion; a kept value is rounded. An ulp is
# 2^-8 of a value; 2.2 of them were the most between the norms of a GPT 768 wide.
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("dropout", "float32", 1e-5),
        pytest.param("llama", "bfloat16", 2**-5, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_layer_from_residuals_are_those_of_recomputing(
    name, dtype, bound
):
    program, segments = gpt(name, dtype)
    check(program, segments[1], bound=bound)


def test_gradients_of_a_tied_embedding_from_residuals_are_those_of_recomputing():
    program, (first, *_, last) = gpt("gpt2")
    table = first.spec.trained_params[0]
    assert table.path == "token_embedding" and table in last.spec.trained_params
    check(program, first)


@pytest.mark.parametrize("name", MODELS)
def test_backward_from_residuals_runs_no_matmul_of_the_forward_pass(name):
    layer = gpt(name)[1][1].keeping
    forward = contractions(layer.whole.body.jaxpr.eqns)
    assert contractions(layer.halves.again.equations) == []
    # Each product has two in the backward pass: for either side.
    backward = contractions(layer.halves.backward.equations)
    assert sum(backward) == 2 * sum(forward)


@pytest.mark.slow
def test_gradients_from_less_are_those_of_recomputing():
    program, segments = gpt("llama", **LARGE_GPT)
    check(program, selective(segments[1]))
    assert 0 < kept_bytes(selective(segments[1])) < kept_bytes(segments[1])


def test_scores_are_not_kept_but_computed_again_where_less_is_kept():
    segment = gpt("gpt2", **LARGE_GPT)[1][1]
    config, layer = config_of("gpt2", **LARGE_GPT), selective(segment)
    tokens, heads = config.max_length, config.num_heads
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


def test_the_width_of_a_head_decides_what_is_cheap_for_its_size():
    # 2 * 144 operations for 4 bytes of a score are too many.
    segment = gpt("gpt2", **LARGE_GPT | {"num_heads": 1})[1][1]
    assert selective(segment).residuals() == segment.residuals()


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [("gpt2", 8, "float32"), ("gpt2", 32, "bfloat16"), ("dropout", 8, "float32")]
    + [("llama", 8, "float32")],
)
def test_a_layer_keeps_its_widths_and_the_attention_of_each_token(name, tokens, dtype):
    config = config_of(name, max_length=tokens)
    # Query, key, value, mixed values, the sum in the middle; the hidden layer. Key and
    # value of a llama have fewer heads, and its hidden layer a gate.
    widths = 5 * config.embed_dim + config.hidden_dim
    # float32: exponentials and their sum for each head; mean and deviation of 2 norms.
    float32s = config.num_heads * (tokens + 1) + 4
    if name == "llama":
        kv_dim = config.kv_heads * config.head_dim
        widths = 3 * config.embed_dim + 2 * kv_dim + 2 * config.hidden_dim
        float32s -= 2
    # Two masks, of one byte each.
    masks = 2 * config.embed_dim * (name == "dropout")
    token_bytes = widths * jnp.dtype(dtype).itemsize + 4 * float32s + masks
    segment = gpt(name, dtype, max_length=tokens)[1][1]
    assert kept_bytes(segment) == 2 * tokens * token_bytes


# Small layers: what a segment keeps.

MATRICES = {"layers": [spec(WIDTH, WIDTH)] * 4}
PAIRS = {"layers": [{n: spec(WIDTH, WIDTH) for n in "vw"}] * 4}
X, ORDER, KEY = spec(4, WIDTH), spec(8, dtype=jnp.int32), abstract(jax.random.key(0))


@dataclass(frozen=True)
class Case:
    """Layers one after the other, then a mean square.

    Attributes:
        kept: the shapes that each segment keeps, of those that keep any.
        takes_key: whether a layer takes a random key.
    """

    layer: Callable
    kept: tuple[Any, ...] = ()
    params: Any = field(default_factory=lambda: MATRICES)
    takes_key: bool = False
    frozen: tuple[str, ...] = ()
    max_remat_bytes: int = 0


def layered(layer):
    def loss(params, x, *key):
        for i, p in enumerate(params["layers"]):
            keys = (jax.random.fold_in(*key, i),) if key else ()
            x = layer(p, x, *keys)
        return jnp.mean(x**2)

    return loss


def segments_of(loss, params, batch=X, *, key=None, frozen=(), max_remat_bytes=0):
    """`(program, segments)` of a loss over specs, about one matrix a segment."""
    source = trace_loss(
        loss, params, batch, key=key, has_aux=False, max_remat_bytes=max_remat_bytes
    )
    max_bytes = 4 * (WIDTH + 1) * WIDTH
    cut = segment_loss(source, frozen=frozen, splittable=(), max_bytes=max_bytes)
    return cut.program, compiled_on(CPU, cut)


def keeping(segments):
    """The segments that run a backward pass of their own, one a body."""
    bodies = {s.spec.body: s for s in segments[:-1] if s.spec.has_backward}
    assert bodies
    return list(bodies.values())


def read_thrice(w, x):
    h = x @ w
    return jnp.sin(h) * jnp.cos(x @ w) + jnp.tanh(h)


def looped(w, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]


@jax.custom_vjp
def noisy(x, key):
    return x + jax.random.normal(key, x.shape)


def _noisy_backward(key, g):
    return g * jax.random.normal(key, g.shape), None


noisy.defvjp(
    lambda x, key: (noisy(x, key), jax.random.fold_in(key, 1)), _noisy_backward
)
TWICE = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
CASES = {
    "an argument": Case(lambda w, x: x @ w),
    "cheap steps from an input": Case(lambda w, x: jnp.exp(jnp.sin(x) * 0.5) @ w),
    # What the sine is taken of, and not w @ w.T.
    "of parameters alone": Case(lambda w, x: jnp.sin(x @ (w @ w.T)), (X.shape,)),
    "read thrice, kept once": Case(read_thrice, (X.shape,)),
    # Neither the product with v nor what v multiplies: only tanh has a derivative.
    "frozen": Case(
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"],
        (X.shape,),
        PAIRS,
        frozen=tuple(f"layers/{i}/v" for i in range(4)),
    ),
    "in a loop": Case(looped, ((3, *X.shape),) * 3),
    "the user rematerialises": Case(TWICE, max_remat_bytes=4 * WIDTH * WIDTH),
    # Its words, and not the noise that its backward rule draws from it again.
    "a random key": Case(
        lambda w, x, key: noisy(x @ w, key), (array_spec(KEY).shape,), takes_key=True
    ),
}


SLOW = [pytest.param("a random key", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", [n for n in CASES if n != "a random key"] + SLOW)
def test_a_layer_keeps_only_what_its_backward_pass_cannot_do_without(name):
    case = CASES[name]
    program, segments = segments_of(
        layered(case.layer),
        case.params,
        key=KEY if case.takes_key else None,
        frozen=case.frozen,
        max_remat_bytes=case.max_remat_bytes,
    )
    for segment in keeping(segments):
        residuals = check(program, segment)
        # With `frozen`, v is a segment of its own.
        is_empty = name == "frozen" and not residuals
        assert is_empty or tuple(r.shape for r in residuals) == case.kept


def test_integer_inputs_have_no_cotangent_and_are_not_kept():
    def loss(params, batch):
        x = jnp.take(params["table"], batch["tokens"], axis=0)
        for w in params["layers"]:
            x = jnp.tanh(x @ w) + jnp.take(x, batch["order"], axis=0)
        return jnp.mean(x**2)

    params = {"table": spec(8, WIDTH), **MATRICES}
    batch = {"tokens": ORDER, "order": ORDER}
    program, segments = segments_of(loss, params, batch)
    for segment in keeping(segments):
        residuals = check(program, segment)
        assert all(r.nbytes <= 8 * WIDTH * 4 for r in residuals)
    assert any("batch/order" in s.spec.inputs for s in keeping(segments))


def test_a_debug_callback_runs_in_the_forward_pass_only():
    seen = []

    def layer(w, x):
        y = x @ w
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.tanh(y)

    program, segments = segments_of(layered(layer), MATRICES)
    segment = keeping(segments)[0]
    params, read, inputs, cotangents = arguments_of(program, segment)
    _, residuals = segment.forward_keeping(params, inputs)
    jax.effects_barrier()
    count = len(seen)
    assert count >= 1
    jax.block_until_ready(segment.backward_from(read, inputs, residuals, cotangents))
    jax.effects_barrier()
    assert len(seen) == count


def test_residuals_are_known_without_compiling_and_executables_are_shared():
    def loss(params, x):
        x = jnp.tanh(x @ params["frozen"])
        return layered(lambda w, x: jnp.tanh(x @ w))(params, x)

    params = {"frozen": spec(WIDTH, WIDTH), **MATRICES}
    _, segments = segments_of(loss, params, frozen={"frozen"})
    # The last segment and one without a backward pass keep nothing.
    without = [s for s in segments[:-1] if not s.spec.has_backward]
    assert without
    assert all(s.residuals() == () for s in (*without, segments[-1]))
    first, *others = [s for s in segments if s.spec.body == segments[3].spec.body]
    assert others
    passes = {"forward", "backward"}
    assert first.residuals()
    assert passes.isdisjoint(vars(first.keeping))
    workspace = first.keeping_workspace()
    assert workspace.forward_bytes >= 0 and workspace.backward_bytes >= 0
    assert all(s.keeping is first.keeping for s in others)
    assert passes <= set(vars(first.keeping))
    assert passes.isdisjoint(vars(first.executables))
    assert passes.isdisjoint(vars(selective(first).keeping))
