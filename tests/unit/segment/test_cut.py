"""Cuts are narrow, keep within the limit, and treat every layer alike."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.jaxpr.compat import fresh
from zinf.segment import segment_loss, trace_loss
from zinf.segment.cut import SEGMENT_COST_BYTES, Tape, choose_cuts, read_tape
from zinf.segment.order import order_equations

WIDTH = 16


def variable(nbytes):
    assert nbytes % 4 == 0
    return fresh(jax.core.ShapedArray((nbytes // 4,), np.dtype("float32")))


def cost(tape, cuts):
    inner = cuts[1:-1]
    return sum(tape.live_bytes[c] + SEGMENT_COST_BYTES for c in inner)


def holds(tape, cuts, max_bytes):
    pairs = zip(cuts, cuts[1:], strict=False)
    return all(tape.param_bytes(a, b) <= max_bytes or b - a == 1 for a, b in pairs)


def random_tape(seed, length=9):
    """No two equations are equal, and some parameters are read twice."""
    rng = np.random.default_rng(seed)
    weights = [variable(4 * int(n)) for n in rng.integers(1, 50, size=length)]
    params = tuple(
        tuple(weights[j] for j in rng.choice(length, size=rng.integers(0, 3)))
        for _ in range(length)
    )
    live = tuple(int(n) for n in rng.integers(0, 30_000, size=length + 1))
    return Tape(tuple(range(length)), params, live)


@pytest.mark.parametrize("seed", range(20))
def test_without_layers_the_cuts_are_the_best_of_all(seed):
    tape = random_tape(seed)
    max_bytes = 160
    found = choose_cuts(tape, max_bytes=max_bytes)
    every = (
        [0, *inner, len(tape)]
        for count in range(len(tape))
        for inner in combinations(range(1, len(tape)), count)
    )
    best = min(cost(tape, c) for c in every if holds(tape, c, max_bytes))
    assert holds(tape, found, max_bytes)
    assert cost(tape, found) == best


def test_what_fits_is_not_cut():
    tape = random_tape(0)
    assert choose_cuts(tape, max_bytes=10**6) == [0, len(tape)]


# Programs.


def init(num_layers):
    def layer():
        square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        return {"in": square, "out": square, "scale": vector}

    vector = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    table = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
    layers = [layer() for _ in range(num_layers)]
    return {"embed": table, "layers": layers, "head": table}


def stacked(num_layers):
    params = init(1)
    (layer,) = params.pop("layers")
    stack = {
        k: jax.ShapeDtypeStruct((num_layers, *v.shape), v.dtype)
        for k, v in layer.items()
    }
    return {**params, "layers": stack}


def norm(x, scale):
    return (
        x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale[None, None]
    )


def pre_norm(p, x):
    return x + jax.nn.gelu(norm(x, p["scale"]) @ p["in"]) @ p["out"]


def post_norm(p, x):
    return norm(x + jax.nn.gelu(x @ p["in"]) @ p["out"], p["scale"])


def head_loss(params, x):
    return jax.nn.logsumexp(x @ params["head"].T, axis=-1).mean()


def loop(block):
    def loss(params, tokens):
        x = params["embed"][tokens]
        for p in params["layers"]:
            x = block(p, x)
        return head_loss(params, x)

    return loss


def scan(block):
    def loss(params, tokens):
        step = lambda x, p: (block(p, x), None)  # noqa: E731
        x = jax.lax.scan(step, params["embed"][tokens], params["layers"])[0]
        return head_loss(params, x)

    return loss


def chained_dropout(params, tokens, key):
    x = params["embed"][tokens]
    for p in params["layers"]:
        key, sub = jax.random.split(key)
        x = pre_norm(p, x) * jax.random.bernoulli(sub, 0.9, x.shape)
    return head_loss(params, x)


def folded_dropout(params, tokens, key):
    x = params["embed"][tokens]
    for i, p in enumerate(params["layers"]):
        mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = pre_norm(p, x) * mask
    return head_loss(params, x)


TOKENS = jax.ShapeDtypeStruct((4, 8), jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def source_of(loss, params, *, max_remat_bytes=0):
    key = KEY if loss in (chained_dropout, folded_dropout) else None
    return trace_loss(loss, params, TOKENS, key=key, max_remat_bytes=max_remat_bytes)


def segmented(loss, params, *, max_bytes=None, **options):
    source = source_of(loss, params, **options)
    paths = set(source.params.values())
    return segment_loss(source, frozen=(), splittable=paths, max_bytes=max_bytes)


def tape_of(loss, params):
    source = source_of(loss, params)
    return read_tape(order_equations(source.graph, source.params))


CASES = {
    "pre-norm": (loop(pre_norm), init),
    "post-norm": (loop(post_norm), init),
    "scan": (scan(pre_norm), stacked),
    "remat": (loop(jax.checkpoint(pre_norm)), init),
    "scan of remat": (scan(jax.checkpoint(pre_norm)), stacked),
    "key chain": (chained_dropout, init),
    "key folded": (folded_dropout, init),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "remat_bytes"),
    [(n, 0) for n in CASES] + [(n, 10**9) for n in CASES if "remat" in n],
)
def test_48_layers_have_as_many_bodies_as_4(name, remat_bytes):
    loss, make = CASES[name]
    programs = [
        segmented(loss, make(n), max_remat_bytes=remat_bytes).program for n in (4, 48)
    ]
    bodies = [len({s.body for s in p.segments}) for p in programs]
    assert bodies[0] == bodies[1]
    counts = [len(p.segments) for p in programs]
    assert counts[1] - counts[0] == 44


@pytest.mark.parametrize("name", CASES)
def test_one_layer_is_one_segment(name):
    loss, make = CASES[name]
    program = segmented(loss, make(6)).program
    for number in range(6):
        readers = {
            s.name
            for s in program.segments
            for a in s.params
            if a.path.startswith(f"layers/{number}/") or a.rows == (number, number + 1)
        }
        # A cut may lie inside a block, but then at the same place in every block.
        assert len(readers) <= 2
    bodies = [s.body for s in program.segments]
    assert max(map(bodies.count, bodies)) >= 4


def test_what_is_carried_between_layers_is_one_activation_and_a_key():
    program = segmented(chained_dropout, init(6)).program
    activation = 4 * 8 * WIDTH * 4
    middle = program.segments[len(program.segments) // 2]
    nbytes = sum(
        program.values[n].nbytes for n in middle.inputs if n not in program.batch
    )
    assert activation <= nbytes <= activation + 64


@pytest.mark.parametrize("max_bytes", [1100, 1500, 3000])
@pytest.mark.parametrize("name", ["pre-norm", "post-norm", "key chain"])
def test_no_segment_holds_more_than_the_limit(name, max_bytes):
    loss, make = CASES[name]
    tape = tape_of(loss, make(5))
    cuts = choose_cuts(tape, max_bytes=max_bytes)
    assert cuts == sorted(set(cuts)) and (cuts[0], cuts[-1]) == (0, len(tape))
    # An array larger than the limit is on its own: the table of 2048 bytes.
    assert holds(tape, cuts, max_bytes)


@pytest.mark.parametrize("max_bytes", [1100, 1500])
def test_a_layer_larger_than_the_limit_is_cut_as_every_other_layer(max_bytes):
    loss, make = CASES["pre-norm"]
    programs = [segmented(loss, make(n), max_bytes=max_bytes).program for n in (4, 12)]
    bodies = [len({s.body for s in p.segments}) for p in programs]
    assert bodies[0] == bodies[1]


def test_an_encoder_and_a_decoder_are_both_cut_by_layer():
    def loss(params, tokens):
        x = params["embed"][tokens]
        y = params["head"][tokens]
        for p in params["encoder"]:
            x = pre_norm(p, x)
        for p in params["decoder"]:
            y = jnp.tanh(post_norm(p, y) @ jnp.swapaxes(x, -1, -2) @ x)
        return head_loss(params, y)

    def make(encoders, decoders):
        params = init(encoders)
        return {
            "embed": params["embed"],
            "head": params["head"],
            "encoder": params["layers"],
            "decoder": init(decoders)["layers"],
        }

    def bodies(*sizes):
        program = segmented(loss, make(*sizes)).program
        return program, [s.body for s in program.segments]

    small, of_small = bodies(4, 5)
    large, of_large = bodies(12, 10)
    assert len(set(of_small)) == len(set(of_large))
    assert len(of_large) - len(of_small) == (12 - 4) + (10 - 5)


def test_a_model_without_layers_is_cut_at_an_eighth():
    def loss(params, x):
        for i in range(12):
            x = (jnp.tanh if i % 2 else jnp.sin)(x @ params[i])
        return x.sum()

    sizes = [8 + 8 * ((5 * i) % 12) for i in range(13)]
    shapes = list(zip(sizes, sizes[1:], strict=False))
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    x = jax.ShapeDtypeStruct((4, sizes[0]), jnp.float32)
    source = trace_loss(loss, params, x, max_remat_bytes=0)
    tape = read_tape(order_equations(source.graph, source.params))
    cuts = choose_cuts(tape, max_bytes=None)
    total = tape.param_bytes(0, len(tape))
    largest = max(4 * a * b for a, b in shapes)
    assert len(cuts) > 3
    assert holds(tape, cuts, max(total // 8, 2 * largest))
