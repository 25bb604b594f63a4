"""A backward pass from residuals gives what recomputing gives, and runs less."""

from dataclasses import replace
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow_except
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


def segments_of(loss, params, batch, *, key=None, frozen=(), max_remat_bytes=0):
    """`(program, segments)` of a loss over specs, about one matrix a segment."""
    source = trace_loss(
        loss, params, batch, key=key, has_aux=False, max_remat_bytes=max_remat_bytes
    )
    max_bytes = 4 * (WIDTH + 1) * WIDTH
    cut = segment_loss(source, frozen=frozen, splittable=(), max_bytes=max_bytes)
    return cut.program, compiled_on(CPU, cut)


@cache
def gpt(name, dtype="float32", **options):
    config = GPTConfig(**{**SMALL_GPT, **MODELS[name], **options})
    init, loss = init_and_loss(config, seed=0)
    params = jax.tree.map(lambda p: spec(*p.shape, dtype=dtype), jax.eval_shape(init))
    batch = {"tokens": spec(2, config.max_length + 1, dtype=jnp.int32)}
    key = abstract(jax.random.key(0)) if config.dropout else None
    source = trace_loss(loss, params, batch, key=key, has_aux=False, max_remat_bytes=0)
    cut = segment_loss(source, frozen=(), splittable=(), max_bytes=None)
    return cut.program, compiled_on(CPU, cut)


def keeping(segments):
    """The segments that run a backward pass of their own, one a body."""
    bodies = {s.spec.body: s for s in segments[:-1] if s.spec.has_backward}
    assert bodies
    return list(bodies.values())


def random(array, rng):
    if array.dtype == "uint32":  # words of a random key
        return jnp.asarray(rng.integers(0, 2**31, array.shape), array.dtype)
    if "int" in array.dtype:
        return jnp.asarray(rng.integers(0, 8, array.shape), array.dtype)
    return jnp.asarray(rng.normal(size=array.shape) / 3, array.dtype)


def arguments_of(program, segment):
    """`(params, inputs, cotangents)` of a segment, drawn at random."""
    rng = np.random.default_rng(0)
    leaves = {leaf.path: leaf.array_spec() for leaf in program.leaves}
    draw = lambda specs: [random(s, rng) for s in specs]  # noqa: E731
    return (
        draw(leaves[a.path] for a in segment.spec.params),
        draw(program.values[n] for n in segment.spec.inputs),
        draw(program.values[n] for n in segment.spec.active_outputs),
    )


def read_backward(segment, params):
    """Those of the params of a segment that its backward pass reads."""
    pairs = zip(segment.spec.params, params, strict=True)
    return [x for array, x in pairs if array in segment.spec.read_backward]


def selective(segment):
    return replace(segment, is_selective=True)


def check(program, segment, *, bound=1e-5):
    """Compares both ways of running a segment; `bound` is relative to the norm.

    In float32 most gradients are equal to the last bit; 1e-5, some 80 ulps, leaves XLA
    free to fuse the passes differently.
    """
    params, inputs, cotangents = arguments_of(program, segment)
    outputs, residuals = segment.forward_keeping(params, inputs)
    assert tuple(map(array_spec, residuals)) == segment.residuals()
    read = read_backward(segment, params)
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


def flops(executable):
    return executable.cost_analysis()["flops"]


def contractions(equations):
    """The floating-point operations of each matrix product, in order."""
    return [equation_flops(e) for e in equations if e.primitive.name == "dot_general"]


def block(w, x):
    return jnp.tanh(x @ w)


def layered(layer):
    """A loss over `{"layers": [...]}`: one after the other, then a mean square."""

    def loss(params, x, *key):
        for i, p in enumerate(params["layers"]):
            keys = (jax.random.fold_in(*key, i),) if key else ()
            x = layer(p, x, *keys)
        return jnp.mean(x**2)

    return loss


MATRICES = {"layers": [spec(WIDTH, WIDTH)] * 4}
X = spec(4, WIDTH)


@pytest.mark.parametrize("name", slow_except(["dropout"], MODELS))
def test_gradients_of_a_layer_from_residuals_are_those_of_recomputing(name):
    program, segments = gpt(name)
    check(program, segments[1])


def test_gradients_of_a_tied_embedding_from_residuals_are_those_of_recomputing():
    program, segments = gpt("gpt2")
    first, *_, last = segments
    table = first.spec.trained_params[0]
    assert table.path == "token_embedding" and table in last.spec.trained_params
    check(program, first)


@pytest.mark.slow
def test_bfloat16_gradients_differ_by_a_few_roundings():
    # XLA drops roundings to bfloat16 inside a fusion; a kept value is rounded. An ulp
    # is 2^-8 of a value; 2.2 of them were the most between the norms of a GPT 768 wide.
    program, segments = gpt("llama", "bfloat16")
    check(program, segments[1], bound=2**-5)


@pytest.mark.parametrize("name", MODELS)
def test_backward_from_residuals_runs_no_matmul_of_the_forward_pass(name):
    _, segments = gpt(name)
    layer = segments[1].keeping
    forward = contractions(layer.whole.body.jaxpr.eqns)
    assert contractions(layer.halves.again.equations) == []
    # Each product has two in the backward pass: for either side.
    backward = contractions(layer.halves.backward.equations)
    assert sum(backward) == 2 * sum(forward)


@pytest.mark.parametrize("name", slow_except(["llama"], MODELS))
def test_gradients_from_less_are_those_of_recomputing(name):
    program, segments = gpt(name, **LARGE_GPT)
    layer = selective(segments[1])
    kept = sum(r.nbytes for r in check(program, layer))
    assert 0 < kept < sum(r.nbytes for r in segments[1].residuals())


def test_scores_are_not_kept_but_computed_again_where_less_is_kept():
    _, segments = gpt("gpt2", **LARGE_GPT)
    config, layer = GPTConfig(**{**SMALL_GPT, **LARGE_GPT}), selective(segments[1])
    tokens, heads = config.max_length, config.num_heads
    scores = (1, 2, heads, tokens, tokens)
    assert scores in {r.shape for r in segments[1].residuals()}
    assert scores not in {r.shape for r in layer.residuals()}
    flops = 2 * prod(scores) * config.head_dim
    assert contractions(layer.keeping.halves.again.equations) == [flops]
    assert layer.keeping.halves.flops_again == flops
    assert segments[1].keeping.halves.flops_again == 0
    # Nine widths; the maximum and sum for each head, mean and deviation of two norms.
    widths = 5 * config.embed_dim + config.hidden_dim
    wanted = 2 * tokens * 4 * (widths + 2 * heads + 4)
    assert sum(r.nbytes for r in layer.residuals()) == wanted


def test_the_width_of_a_head_decides_what_is_cheap_for_its_size():
    # 2 * 144 operations for 4 bytes of a score are too many.
    _, segments = gpt("gpt2", **LARGE_GPT | {"num_heads": 1})
    assert selective(segments[1]).residuals() == segments[1].residuals()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_matmuls_are_gone_from_the_executable(name):
    _, segments = gpt(name)
    layer = segments[1].executables
    forward = contractions(layer.body.jaxpr.eqns)
    # Recomputing runs all but the last, the down projection, whose result no gradient
    # needs. Elementwise work is saved too, since less of it runs again.
    saved = flops(layer.backward) - flops(segments[1].keeping.backward)
    assert saved >= sum(forward[:-1]) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [8, 32])
def test_a_gpt_layer_keeps_nine_widths_and_the_attention_a_token(tokens, dtype):
    config = GPTConfig(**{**SMALL_GPT, "max_length": tokens})
    _, segments = gpt("gpt2", dtype, max_length=tokens)
    rows, heads = 2 * tokens, config.num_heads
    # Query, key, value, mixed values, the sum in the middle; the hidden layer.
    widths = 5 * config.embed_dim + config.hidden_dim
    # float32: exponentials and their sum for each head; mean and deviation of 2 norms.
    float32s = heads * (tokens + 1) + 4
    wanted = rows * (widths * jnp.dtype(dtype).itemsize + 4 * float32s)
    assert sum(r.nbytes for r in segments[1].residuals()) == wanted


def test_a_llama_layer_keeps_its_gate_and_up_projections():
    config = GPTConfig(**{**SMALL_GPT, **MODELS["llama"]})
    _, segments = gpt("llama")
    rows, kv_dim = 2 * config.max_length, config.kv_heads * config.head_dim
    widths = 3 * config.embed_dim + 2 * kv_dim + 2 * config.hidden_dim
    float32s = config.num_heads * (config.max_length + 1) + 2
    wanted = rows * 4 * (widths + float32s)
    assert sum(r.nbytes for r in segments[1].residuals()) == wanted


def test_dropout_keeps_its_masks_as_booleans():
    config = GPTConfig(**{**SMALL_GPT, **MODELS["dropout"]})
    plain, dropped = gpt("gpt2")[1][1], gpt("dropout")[1][1]
    size = lambda s: sum(r.nbytes for r in s.residuals())  # noqa: E731
    masks = 2 * (2 * config.max_length * config.embed_dim)  # two, of one byte each
    assert size(dropped) == size(plain) + masks


def test_a_residual_that_is_an_argument_is_not_kept():
    program, segments = segments_of(layered(lambda w, x: x @ w), MATRICES, X)
    for segment in keeping(segments):
        assert check(program, segment) == []


def test_what_follows_from_an_input_by_cheap_steps_is_not_kept():
    layer = lambda w, x: jnp.exp(jnp.sin(x) * 0.5) @ w  # noqa: E731
    program, segments = segments_of(layered(layer), MATRICES, X)
    for segment in keeping(segments):
        assert check(program, segment) == []


def test_what_depends_on_parameters_alone_is_not_kept():
    layer = lambda w, x: jnp.sin(x @ (w @ w.T))  # noqa: E731
    program, segments = segments_of(layered(layer), MATRICES, X)
    for segment in keeping(segments):
        (residual,) = check(program, segment)
        assert residual.shape == X.shape  # what the sine is taken of, and not w @ w.T


def test_a_value_is_kept_once_for_all_that_read_it():
    def layer(w, x):
        h = x @ w
        return jnp.sin(h) * jnp.cos(x @ w) + jnp.tanh(h)

    program, segments = segments_of(layered(layer), MATRICES, X)
    for segment in keeping(segments):
        (residual,) = check(program, segment)
        assert residual.shape == X.shape


def test_integer_inputs_have_no_cotangent_and_are_not_kept():
    def loss(params, batch):
        x = jnp.take(params["table"], batch["tokens"], axis=0)
        for w in params["layers"]:
            x = block(w, x) + jnp.take(x, batch["order"], axis=0)
        return jnp.mean(x**2)

    params = {"table": spec(8, WIDTH), **MATRICES}
    integers = spec(8, dtype=jnp.int32)
    batch = {"tokens": integers, "order": integers}
    program, segments = segments_of(loss, params, batch)
    for segment in keeping(segments):
        residuals = check(program, segment)
        assert all(r.nbytes <= 8 * WIDTH * 4 for r in residuals)
    assert any("batch/order" in s.spec.inputs for s in keeping(segments))


def test_frozen_parameters_get_no_gradient_and_need_no_residuals():
    loss = layered(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"])
    params = {"layers": [{n: spec(WIDTH, WIDTH) for n in "vw"}] * 4}
    frozen = {f"layers/{i}/v" for i in range(4)}
    program, segments = segments_of(loss, params, X, frozen=frozen)
    for segment in keeping(segments):
        check(program, segment)
        # Neither the product with v nor what v multiplies: only tanh has a derivative.
        assert len(segment.residuals()) <= 1


def test_a_parameter_that_several_segments_read_gets_the_gradient_of_each():
    def loss(params, x):
        x = block(params["shared"], x)
        for w in params["layers"]:
            x = block(w, x)
        return jnp.mean((x @ params["shared"].T) ** 2)

    params = {"shared": spec(WIDTH, WIDTH), **MATRICES}
    program, segments = segments_of(loss, params, X)
    readers = [s for s in segments if any(a.path == "shared" for a in s.spec.params)]
    assert len(readers) == 2
    for segment in keeping(segments):
        check(program, segment)


@pytest.mark.slow
def test_a_random_key_that_a_rule_keeps_is_kept_as_its_words():
    """And not the noise that its backward rule draws from it again."""

    @jax.custom_vjp
    def noisy(x, key):
        return x + jax.random.normal(key, x.shape)

    def forward(x, key):
        return noisy(x, key), jax.random.fold_in(key, 1)

    def backward(key, g):
        return g * jax.random.normal(key, g.shape), None

    noisy.defvjp(forward, backward)
    layer = lambda w, x, key: noisy(x @ w, key)  # noqa: E731
    key = abstract(jax.random.key(0))
    program, segments = segments_of(layered(layer), MATRICES, X, key=key)
    words = array_spec(key)
    for segment in keeping(segments):
        check(program, segment)
        assert segment.residuals() == (words,)


def test_a_loop_keeps_what_its_backward_pass_reads():
    def layer(w, x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]

    program, segments = segments_of(layered(layer), MATRICES, X)
    for segment in keeping(segments):
        check(program, segment)
        assert any(r.shape[0] == 3 for r in segment.residuals())


def test_what_the_user_rematerialises_is_not_kept():
    layer = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
    options = {"max_remat_bytes": 4 * WIDTH * WIDTH}
    program, segments = segments_of(layered(layer), MATRICES, X, **options)
    for segment in keeping(segments):
        assert check(program, segment) == []


def test_a_debug_callback_runs_in_the_forward_pass_only():
    seen = []

    def layer(w, x):
        y = x @ w
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.tanh(y)

    program, segments = segments_of(layered(layer), MATRICES, X)
    segment = keeping(segments)[0]
    params, inputs, cotangents = arguments_of(program, segment)
    _, residuals = segment.forward_keeping(params, inputs)
    jax.effects_barrier()
    count = len(seen)
    assert count >= 1
    read = read_backward(segment, params)
    jax.block_until_ready(segment.backward_from(read, inputs, residuals, cotangents))
    jax.effects_barrier()
    assert len(seen) == count


def test_the_last_segment_and_one_without_a_backward_pass_keep_nothing():
    def loss(params, x):
        x = jnp.tanh(x @ params["frozen"])
        return layered(block)(params, x)

    params = {"frozen": spec(WIDTH, WIDTH), **MATRICES}
    _, segments = segments_of(loss, params, X, frozen={"frozen"})
    assert segments[-1].residuals() == ()
    without = [s for s in segments[:-1] if not s.spec.has_backward]
    assert without and all(s.residuals() == () for s in without)


def test_residuals_are_known_without_compiling_and_executables_are_shared():
    program, segments = segments_of(layered(block), MATRICES, X)
    first, *others = [s for s in segments if s.spec.body == segments[1].spec.body]
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
