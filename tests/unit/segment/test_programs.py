"""One table of small programs: how each is cut, and that it computes what jax does.

`golden/` has the segments of every program: what each reads, computes and
differentiates, and which of them share a body.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import Golden
from tests.unit.segment.on_one import compiled_on
from zinf.core.jaxpr import abstract
from zinf.core.program import Program
from zinf.core.segment import (
    named_leaves,
    rest_by_row,
    segment_function,
    segment_loss,
    trace_function,
    trace_loss,
)

WIDTH = 8
CPU = jax.devices("cpu")[0]
RNG = np.random.default_rng(0)
TABLE = np.arange(WIDTH, dtype=np.float32)[None]


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32)


def layers(count):
    return [{"w": normal(WIDTH, WIDTH), "b": normal(1, WIDTH)} for _ in range(count)]


X = normal(4, WIDTH)


@dataclass(frozen=True)
class Case:
    """A loss; `is_run`: its gradients are compared (compiling takes longest)."""

    loss: Callable
    params: Any
    batch: Any = field(default_factory=lambda: X)
    has_aux: bool = False
    frozen: tuple[str, ...] = ()
    is_run: bool = True


def block(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def loop(layer):
    def loss(params, x):
        for p in params["layers"]:
            x = layer(p, x)
        return jnp.mean(x**2)

    return loss


def branch(p, x):
    return jax.lax.cond(x.sum() > 0, block, lambda p, y: y * p["b"], p, x)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda c, p: (block(p, c), None), x, params)[0] ** 2)


def some_rows(params, x):
    for i in (0, 2, 3):
        x = jnp.tanh(x @ params["w"][i])
    return jnp.mean(x**2)


def tied(params, x):
    x = jnp.tanh(x @ params["table"])
    for p in params["layers"]:
        x = block(p, x)
    return jnp.mean((x @ params["table"].T) ** 2)


def skipping(params, x):
    first = jnp.tanh(x @ params["a"])
    second = jnp.tanh(first @ params["b"])
    return (second @ params["c"] + first).mean()


def active(params, x):
    """`c` feeds an auxiliary output only: the last segment gives it a zero gradient."""
    first = jnp.tanh(x @ params["a"])
    count = (first > 0).sum()
    second = jnp.tanh(first @ params["b"])
    return second.mean() * 2, (count, jnp.tanh(first @ params["c"]))


def with_everything(params, batch):
    """Frozen, integer and unused leaves, a constant, and outputs of all kinds."""
    x = batch["x"] * TABLE
    x = x[:, params["order"]]
    for p in params["layers"]:
        x = block(p, x)
    value = jnp.mean(x**2)
    aux = [x, x, batch["x"], 2, params["layers"][0]["w"], value]
    return value, aux


def cast(params, x):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    x = x.astype(jnp.bfloat16)
    for w in half:
        x = jnp.tanh(x @ w)
    return x.astype(jnp.float32).mean()


def looked_up(params, batch):
    x = params["table"][batch] + params["shift"]
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["head"]) ** 2)


def through_integers(params, x):
    """No gradient passes the argmax, so `a`, `b` and `c` have gradients of zero."""
    x = jnp.tanh(x @ params["a"])
    x = jnp.tanh(x @ params["b"])
    choice = jnp.argmax(x @ params["c"], axis=-1)
    return jnp.mean((params["table"][choice] @ params["d"]) ** 2)


SCALAR = {"a": jnp.float32(3)}
PAIR = {"a": normal(WIDTH, WIDTH), "b": normal(WIDTH, WIDTH)}
MATRICES = {"layers": [normal(WIDTH, WIDTH) for _ in range(5)]}
CASES = {
    "layers": Case(loop(block), {"layers": layers(3)}),
    # The first layer gets no cotangent for the batch, so its backward is another.
    "one body": Case(loop(lambda w, x: jnp.tanh(x @ w)), MATRICES, is_run=False),
    "a frozen layer": Case(
        loop(lambda w, x: jnp.tanh(x @ w)), MATRICES, frozen=("layers/2",)
    ),
    "remat": Case(loop(jax.checkpoint(block)), {"layers": layers(3)}),
    "branches": Case(loop(branch), {"layers": layers(3)}),
    "a custom rule": Case(
        loop(lambda p, x: clipped(block(p, x))), {"layers": layers(3)}
    ),
    "a scan": Case(scanned, jax.tree.map(lambda *x: jnp.stack(x), *layers(4))),
    # A stacked leaf of which some rows are read trains them all.
    "some rows": Case(some_rows, {"w": normal(4, WIDTH, WIDTH)}),
    "tied": Case(tied, {"table": normal(WIDTH, WIDTH), "layers": layers(2)}),
    "a skip connection": Case(
        skipping, {n: normal(WIDTH, WIDTH) for n in "abc"}, is_run=False
    ),
    "active": Case(
        active,
        {n: normal(WIDTH, WIDTH) for n in "abc"},
        has_aux=True,
        frozen=("a",),
        is_run=False,
    ),
    "everything": Case(
        with_everything,
        {
            "layers": layers(3),
            "order": jnp.arange(WIDTH)[::-1],
            "unused": normal(3, 3),
        },
        {"x": X},
        has_aux=True,
        frozen=("layers/1/w",),
    ),
    # Each segment casts its own weight: what crosses the cuts is activations only.
    "a cast of all": Case(cast, [normal(WIDTH, WIDTH) for _ in range(3)], is_run=False),
    # Of tanh(x @ w), x is an input or follows from one: the backward pass reads w.
    "a lookup": Case(
        looked_up,
        {
            "table": normal(5, WIDTH),
            "shift": normal(1, WIDTH),
            "w": normal(WIDTH, WIDTH),
            "head": normal(WIDTH, WIDTH),
        },
        jnp.arange(4),
    ),
    "through integers": Case(
        through_integers,
        {n: normal(WIDTH, WIDTH) for n in ("a", "b", "c", "d", "table")},
    ),
    "of the batch": Case(lambda p, x: x.sum(), PAIR),
    "a number": Case(lambda p, x: jnp.float32(3), PAIR),
    "an input": Case(lambda p, x: x, SCALAR, jnp.float32(2), is_run=False),
    "a parameter": Case(lambda p, x: p["a"], SCALAR),
    "elementwise": Case(lambda p, x: jnp.sum(p["a"] * 2.0), PAIR),
    "parameters alone": Case(
        lambda p, x: (p["a"] ** 2).sum() + (p["b"] ** 2).sum(), PAIR, is_run=False
    ),
}


@cache
def segmented(name):
    case = CASES[name]
    specs = [jax.tree.map(abstract, t) for t in (case.params, case.batch)]
    source = trace_loss(case.loss, *specs, has_aux=case.has_aux, max_remat_bytes=0)
    return segment_loss(
        source,
        frozen=case.frozen,
        splittable=set(source.params.values()),
        max_bytes=4 * (WIDTH + 1) * WIDTH,
    )


@cache
def compiled(name):
    return compiled_on(CPU, segmented(name))


def described(program: Program) -> str:
    """A line a segment; a star marks what gets a gradient or a cotangent."""

    def starred(names, marked):
        return " ".join(f"{n}{'*' * (n in marked)}" for n in names)

    lines = [
        f"  {s.name}, body {s.body}, {s.flops} flops: "
        f"{starred(s.params, s.trained_params) or '-'} | "
        f"{starred(s.inputs, s.active_inputs) or '-'} => "
        f"{starred(s.outputs, s.active_outputs)}"
        for s in program.segments
    ]
    outputs = [f"{n}{list(program.values[n].shape)}" for n in program.outputs]
    return "\n".join([*lines, f"  outputs: {' '.join(outputs)}"])


def test_programs_are_cut_as_they_were(golden: Golden) -> None:
    found = [f"{name}:\n{described(segmented(name).program)}" for name in CASES]
    golden.check("programs.txt", "\n".join(found))


def arrays_of(params):
    leaves = named_leaves(params)

    def read(array):
        leaf = leaves[array.path]
        return leaf if array.rows is None else leaf[slice(*array.rows)]

    return read


def run(name, *, seed=1.0):
    """`(loss, aux, gradients by array)` of a program, segment by segment."""
    case, (*others, last) = CASES[name], compiled(name)
    read = arrays_of(case.params)
    values = {f"batch/{n}": x for n, x in named_leaves(case.batch).items()}
    values.update({n: jnp.asarray(x) for n, x in segmented(name).consts.items()})
    gradients, cotangents = defaultdict(float), defaultdict(float)

    def arguments(spec, params):
        return [read(a) for a in params], [values[n] for n in spec.inputs]

    def collect(spec, of_params, of_inputs):
        for array, gradient in zip(spec.trained_params, of_params, strict=True):
            gradients[array] += gradient
        for n, cotangent in zip(spec.active_inputs, of_inputs, strict=True):
            cotangents[n] += cotangent

    for segment in others:
        outputs = segment.forward(*arguments(segment.spec, segment.spec.params))
        values.update(zip(segment.spec.outputs, outputs, strict=True))
    given = arguments(last.spec, last.spec.params)
    (loss, *aux), *results = last.loss(*given, jnp.float32(seed))
    collect(last.spec, *results)
    for segment in reversed(others):
        spec = segment.spec
        if spec.has_backward:
            by = [cotangents[n] for n in spec.active_outputs]
            given = arguments(spec, spec.read_backward)
            collect(spec, *segment.backward(*given, by))
    return loss, aux, dict(gradients)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.is_run])
def test_streamed_gradients_are_those_of_jax(name):
    case = CASES[name]
    found, aux, gradients = run(name)
    function = jax.value_and_grad(case.loss, has_aux=case.has_aux, allow_int=True)
    wanted, wanted_gradients = jax.jit(function)(case.params, case.batch)
    if case.has_aux:
        wanted, wanted_aux = wanted
        wanted_aux = jax.tree.leaves(wanted_aux)
        chex.assert_trees_all_close(aux, wanted_aux, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    leaves = [f for f in segmented(name).program.leaves if f.is_trainable]
    assert set(gradients) == {a for leaf in leaves for a in leaf.arrays()}
    for array, gradient in gradients.items():
        # Rounding only: XLA groups the operations of a segment in its own way.
        expected = arrays_of(wanted_gradients)(array)
        atol = 1e-5 * (float(jnp.abs(expected).max()) + 1e-12)
        np.testing.assert_allclose(gradient, expected, 1e-5, atol, err_msg=str(array))


def test_the_seed_scales_gradients_and_not_the_loss():
    loss, _, gradients = run("layers")
    same, _, scaled = run("layers", seed=4.0)
    assert loss == same
    for array, gradient in gradients.items():
        # A power of two: exact.
        np.testing.assert_array_equal(scaled[array], 4 * gradient)


def test_equal_segments_hold_the_same_executables_and_say_what_they_read():
    segments = compiled("one body")
    pairs = {(s.spec.body, id(s.executables)) for s in segments}
    assert len(pairs) == len({b for b, _ in pairs}) == len({e for _, e in pairs}) == 3
    workspaces = [s.workspace() for s in segments]
    assert max(w.backward_bytes for w in workspaces) > 0
    assert workspaces[-1].forward_bytes == 0 <= segments[-1].evaluation_bytes()
    # The backward pass of a lookup and a sum needs neither.
    specs = [segment.spec for segment in compiled("a lookup")[:-1]]
    assert {a.path for s in specs for a in s.params} == {"table", "shift", "w"}
    assert {a.path for s in specs for a in s.read_backward} == {"w"}


def test_closed_over_arrays_are_constants_of_the_program():
    ((name, table),) = segmented("everything").consts.items()
    assert [*segmented("everything").program.consts] == [name]
    np.testing.assert_array_equal(table, TABLE)


# Functions that only run forward.


def hidden(params, x):
    """The last segment is equal to the others, so that all share one executable."""
    found = []
    for name in "abc":
        x = jnp.tanh(x @ params[name])
        found.append(x)
    return found, found[1]


def uncomputed(params, x):
    y = jnp.tanh(x @ params["a"])
    return x, params["a"], 3, y @ params["b"], y


def unneeded(params, x):
    y = jnp.tanh(x @ params["a"])
    (y @ params["b"]).sum()
    return y


def row_and_whole(params, x):
    return jnp.tanh(x @ params["layers"][1]), params["layers"].sum((1, 2))


def decoded(params, x):
    """Weights in few bits are decoded in the segment that reads them."""
    for layer in params:
        scale = jax.lax.bitcast_convert_type(layer["scales"], jnp.float32)
        x = jnp.tanh(x @ (layer["codes"].astype(jnp.float32) * scale))
    return x


MATRIX_BYTES = 4 * WIDTH * WIDTH
STACK = {"layers": normal(3, WIDTH, WIDTH)}
CODES = {"codes": jnp.zeros((8, 8), jnp.int8), "scales": jnp.zeros((8, 1), jnp.uint32)}
# By name: the function, its parameters, the limit, and leaves that rest by row.
FUNCTIONS = {
    "outputs of every layer": (
        hidden,
        {n: normal(WIDTH, WIDTH) for n in "abc"},
        MATRIX_BYTES,
        (),
    ),
    "outputs that nothing computes": (uncomputed, PAIR, MATRIX_BYTES, ()),
    "what no output needs": (unneeded, PAIR, MATRIX_BYTES, ()),
    "a leaf that rests whole": (row_and_whole, STACK, None, ()),
    "a leaf that rests by row": (row_and_whole, STACK, None, ("layers",)),
    "few bits": (decoded, [CODES] * 3, 8 * 8 + 8 * 4, ()),
}


def test_functions_are_cut_as_they_were(golden: Golden) -> None:
    found = []
    for name, (function, params, max_bytes, by_row) in FUNCTIONS.items():
        specs = [jax.tree.map(abstract, t) for t in (params, X)]
        source = trace_function(function, *specs, max_remat_bytes=0, name="function")
        options = {"splittable": ("layers",), "max_bytes": max_bytes}
        program = segment_function(rest_by_row(source, by_row), **options).program
        assert not program.is_trained
        made = {name for segment in program.segments for name in segment.outputs}
        assert made.issuperset(program.outputs)
        found.append(f"{name}:\n{described(program)}")
    golden.check("functions.txt", "\n".join(found))
