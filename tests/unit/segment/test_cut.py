"""Cuts are narrow, keep within the limit, and treat every layer alike."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.compat import fresh
from zinf.core.segment import segment_loss, trace_loss
from zinf.core.segment.cut import SEGMENT_COST_BYTES, Tape, choose_cuts, read_tape
from zinf.core.segment.order import order_equations
from zinf.core.segment.repeat import Repetition, find_repetition

WIDTH = 16


def variable(nbytes):
    assert nbytes % 4 == 0
    return fresh(jax.core.ShapedArray((nbytes // 4,), np.dtype("float32")))


def cost(tape, cuts):
    return sum(tape.live_bytes[c] + SEGMENT_COST_BYTES for c in cuts[1:-1])


def holds(tape, cuts, max_bytes):
    return all(
        tape.param_bytes(a, b) <= max_bytes or b - a == 1 for a, b in pairwise(cuts)
    )


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


def test_without_layers_the_cuts_are_the_best_of_all():
    for seed in range(20):
        tape = random_tape(seed)
        max_bytes = 160
        found = choose_cuts(tape, max_bytes=max_bytes)
        every = (
            [0, *inner, len(tape)]
            for count in range(len(tape))
            for inner in combinations(range(1, len(tape)), count)
        )
        best = min(cost(tape, c) for c in every if holds(tape, c, max_bytes))
        assert holds(tape, found, max_bytes), seed
        assert cost(tape, found) == best, seed
    # What fits is not cut.
    total = tape.param_bytes(0, len(tape))
    assert choose_cuts(tape, max_bytes=total) == [0, len(tape)]


def repetition(keys):
    """The repetition of a string; each "W" reads 10 bytes of parameters."""
    return find_repetition(keys, [10 * (k == "W") for k in keys])


def test_the_repetition_is_found_between_what_comes_before_and_after():
    for copies in (2, 4, 48):
        found = repetition("xyW" + "abWc" * copies + "zW")
        assert (found.period, found.copies(0)) == (4, copies)
        assert found.start in (2, 3)  # "W" comes before "abWc" or in it: both repeat
    # Of periods that cover nearly the same, the shortest.
    assert repetition("abW" * 12) == Repetition(0, 3, 33)
    # More parameters win over a longer run.
    assert repetition("pqpqpqpqpqpqpqpqpqpq" + "abWWcWW" * 2).period == 7
    for keys in ("abcdefW", "", "W", "abcabcabcW"):
        assert repetition(keys) is None, keys


def test_a_part_of_a_period_is_no_copy():
    found = Repetition(start=2, period=4, num_equal=9)
    assert found.stop == 15
    assert [found.copies(phase) for phase in range(4)] == [3, 3, 2, 2]


# Programs.

TOKENS = jax.ShapeDtypeStruct((4, 8), jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def init(num_layers):
    square, table = (
        jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (WIDTH, 32)
    )
    scale = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    layers = [{"in": square, "out": square, "scale": scale}] * num_layers
    return {"embed": table, "layers": layers, "head": table}


def stacked(num_layers):
    def stack(x):
        return jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype)

    params = init(1)
    return {**params, "layers": jax.tree.map(stack, params["layers"][0])}


def norm(x, scale):
    size = jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x * size * scale[None, None]


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


def scan_of_remat(params, tokens):
    step = lambda x, p: (jax.checkpoint(pre_norm)(p, x), None)  # noqa: E731
    x = jax.lax.scan(step, params["embed"][tokens], params["layers"])[0]
    return head_loss(params, x)


def dropout(is_chained):
    def loss(params, tokens, key):
        x = params["embed"][tokens]
        for i, p in enumerate(params["layers"]):
            if is_chained:
                key, sub = jax.random.split(key)
            else:
                sub = jax.random.fold_in(key, i)
            x = pre_norm(p, x) * jax.random.bernoulli(sub, 0.9, x.shape)
        return head_loss(params, x)

    return loss


# By name: the loss, its parameters, and the bytes of a remat that is not inlined.
CASES = {
    "pre-norm": (loop(pre_norm), init, 0),
    "post-norm": (loop(post_norm), init, 0),
    "remat": (loop(jax.checkpoint(pre_norm)), init, 10**9),
    "scan of remat": (scan_of_remat, stacked, 0),
    "key chain": (dropout(is_chained=True), init, 0),
    "key folded": (dropout(is_chained=False), init, 0),
}


def source_of(name, num_layers):
    loss, make, max_remat_bytes = CASES[name]
    key = KEY if "key" in name else None
    options = {"key": key, "max_remat_bytes": max_remat_bytes}
    return trace_loss(loss, make(num_layers), TOKENS, **options)


def segmented(source, max_bytes=None):
    paths = set(source.params.values())
    cut = segment_loss(source, frozen=(), splittable=paths, max_bytes=max_bytes)
    return cut.program


def described(program):
    """Bodies in order, and the bytes that each segment is given by others."""
    carried = [
        sum(program.values[n].nbytes for n in s.inputs if n not in program.batch)
        for s in program.segments
    ]
    bodies = " ".join(str(s.body) for s in program.segments)
    return f"  bodies {bodies}\n  bytes {' '.join(map(str, carried))}"


def encoder_and_decoder(params, tokens):
    x = params["embed"][tokens]
    y = params["head"][tokens]
    for p in params["encoder"]:
        x = pre_norm(p, x)
    for p in params["decoder"]:
        y = jnp.tanh(post_norm(p, y) @ jnp.swapaxes(x, -1, -2) @ x)
    return head_loss(params, y)


def test_every_layer_is_one_segment_and_a_deeper_model_has_no_more_bodies(golden):
    """Whatever the limit, all layers are cut alike."""
    found = []
    for name in CASES:
        for num_layers, max_bytes in ((6, None), (9, None), (5, 1100)):
            if name == "key chain" and max_bytes:
                continue  # jax 0.12 splits keys in fewer bytes.
            program = segmented(source_of(name, num_layers), max_bytes)
            found.append(f"{name}, {num_layers} layers, {max_bytes}")
            found.append(described(program))
    for encoders, decoders in ((4, 5), (6, 8)):
        params = init(encoders)
        params |= {"encoder": params.pop("layers"), "decoder": init(decoders)["layers"]}
        source = trace_loss(encoder_and_decoder, params, TOKENS, max_remat_bytes=0)
        found.append(f"encoder of {encoders} and decoder of {decoders} layers")
        found.append(described(segmented(source)))
    golden.check("cuts.txt", "\n".join(found))


def test_a_model_without_layers_is_cut_at_an_eighth():
    def loss(params, x):
        for i in range(12):
            x = (jnp.tanh if i % 2 else jnp.sin)(x @ params[i])
        return x.sum()

    sizes = [8 + 8 * ((5 * i) % 12) for i in range(13)]
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in pairwise(sizes)]
    x = jax.ShapeDtypeStruct((4, sizes[0]), jnp.float32)
    source = trace_loss(loss, params, x, max_remat_bytes=0)
    tape = read_tape(order_equations(source.graph, source.params))
    cuts = choose_cuts(tape, max_bytes=None)
    largest = max(4 * a * b for a, b in pairwise(sizes))
    assert len(cuts) > 3
    limit = max(tape.param_bytes(0, len(tape)) // 8, 2 * largest)
    assert cuts == choose_cuts(tape, max_bytes=limit)
