"""Updates by loops give the numbers of the executables whose place they take."""

from dataclasses import replace
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.optim import looped
from zinf.optim.looped import looped_updates
from zinf.optim.rules import scale_by_adagrad
from zinf.optim.separate import separate
from zinf.optim.update import Unit, compile_advance, compile_updates
from zinf_kernels.elementwise import Operation, cpu
from zinf_kernels.elementwise.bounds import error_bounds

NUM_STEPS = 3
FACTOR = np.float32(0.37)
CPU = jax.devices("cpu")[0]
SHAPES = {"kernel": (48, 33), "bias": (16,), "scale": ()}
PARAMS = {path: jax.ShapeDtypeStruct(s, np.float32) for path, s in SHAPES.items()}
KERNEL, BIAS, SCALE = (sorted(SHAPES).index(p) for p in SHAPES)
RATE = optax.cosine_decay_schedule(1e-2, 2 * NUM_STEPS)
SAME_BITS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(RATE),
    "short_moment": optax.lion(1e-2, mu_dtype=jnp.bfloat16),
    "hyperparams": optax.inject_hyperparams(optax.lion)(1e-2),
    "adagrad": optax.chain(scale_by_adagrad(eps=1e-8, initial=0.1), optax.scale(-0.1)),
    "adabelief": optax.adabelief(1e-2),
    "adamax": optax.adamax(RATE),
    "amsgrad": optax.amsgrad(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "radam": optax.radam(1e-2),
    "yogi": optax.yogi(1e-2),
    "rprop": optax.rprop(1e-2),
    "clipped": optax.chain(optax.clip(0.5), optax.lion(1e-2)),
}
# XLA estimates reciprocal roots; that of adan is another form of the same sums in one
# of its results than in the other.
WITHIN_BOUNDS = {
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "rms_adagrad": optax.adagrad(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adan": optax.adan(1e-2),
}
DTYPES = {
    "float32": (np.float32, None),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    # Accumulated in float32, as gradients of several microbatches are.
    "accumulated": (np.float32, jnp.float16),
}


def normal(shape, dtype, seed):
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 0.3).astype(np.float32).astype(dtype)


def steps_of(tx, dtypes, leaf=KERNEL):
    """Of each step: the update, and arrays before and after it by two ways."""
    gradient_dtype, compute_dtype = DTYPES[dtypes]
    separated = separate(tx, PARAMS)
    unit = Unit(leaf, separated.leaves[leaf].spec.shape, gradient_dtype, compute_dtype)
    (step,) = compile_updates(separated, [unit], device=CPU).steps
    (update,) = looped_updates(separated, [unit], device=CPU)
    advance = compile_advance(separated, device=CPU)
    master = normal(unit.shape, np.float32, 0)
    found = [master, *map(np.array, separated.init_state(leaf, master))]
    num_operands = len(found)
    found += [] if compute_dtype is None else [master.astype(compute_dtype)]
    shared = [s.value for s in separated.shared]
    for n in range(NUM_STEPS):
        shared, values = advance(shared)
        gradient = normal(unit.shape, gradient_dtype, n + 1)
        before = [gradient, *(x.copy() for x in found)]
        operands = jax.device_put(before[1 : 1 + num_operands], CPU)
        expected = list(map(np.array, step(FACTOR, values, gradient, *operands)))
        update(FACTOR, values, gradient, *found)
        yield update, values, before, found, expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*product(SAME_BITS, ["float32", "bfloat16"]), ("lion", "accumulated")],
)
def test_updates_have_the_bits_of_their_executables(name, dtypes):
    for *_, found, expected in steps_of(SAME_BITS[name], dtypes):
        chex.assert_trees_all_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*product(WITHIN_BOUNDS, ["float32"]), ("rmsprop", "bfloat16")],
)
def test_others_are_as_near_as_rounding_lets_them(name, dtypes):
    """Each step from the same arrays; two implementations may be two bounds apart."""
    for update, values, before, found, expected in steps_of(
        WITHIN_BOUNDS[name], dtypes
    ):
        scalars = update.scalars(FACTOR, values)
        arrays = [x.reshape(-1) for x in before]
        bounds = error_bounds(update.loop.program, arrays, scalars)
        for x, y, bound in zip(found, expected, bounds, strict=True):
            difference = np.abs(x.astype(float) - y.astype(float)).reshape(-1)
            assert np.all(difference <= 2 * bound)
            # A matter of last places; bfloat16 has 8 bits, and another rounding before.
            precision = 2.0**-7 if y.dtype.itemsize == 2 else 2.0**-19
            largest = np.abs(y.astype(float)).max()
            assert np.all(bound <= precision * largest + 4 * 2.0**-126)


def test_a_block_has_the_bits_of_the_whole():
    separated = separate(optax.lion(0.1), PARAMS)
    units = [Unit(KERNEL, (rows, 33), np.float32) for rows in (48, 7, 41)]
    whole, first, last = looped_updates(separated, units, device=CPU)
    gradient, *wholes = (normal((48, 33), np.float32, seed) for seed in range(3))
    blocks = [x.copy() for x in wholes]
    whole(FACTOR, [], gradient, *wholes)
    first(FACTOR, [], gradient[:7], *(x[:7] for x in blocks))
    last(FACTOR, [], gradient[7:], *(x[7:] for x in blocks))
    chex.assert_trees_all_equal(wholes, blocks, strict=True)


def test_updates_that_differ_in_numbers_share_a_loop():
    unit = Unit(KERNEL, (48, 33), np.float32)
    transforms = optax.lion(0.1), optax.lion(0.2, b1=0.8, weight_decay=0.3)
    one, other = (
        looped_updates(separate(tx, PARAMS), [unit], device=CPU)[0] for tx in transforms
    )
    assert one.loop.program == other.loop.program
    assert one.loop.literals != other.loop.literals


def exponential(updates, params=None):
    return jax.tree.map(jnp.exp, updates)


def negative_power(updates, params=None):
    return jax.tree.map(lambda x: x**-2, updates)


@pytest.mark.parametrize(
    ("tx", "unit"),
    [
        (optax.stateless(exponential), Unit(KERNEL, (48, 33), np.float32)),
        (optax.stateless(negative_power), Unit(KERNEL, (48, 33), np.float32)),
        (optax.lion(0.1), Unit(KERNEL, (48, 33), jnp.float16, jnp.float16)),
        (optax.lion(0.1, mu_dtype=jnp.float16), Unit(KERNEL, (48, 33), np.float32)),
        (optax.lion(0.1), Unit(SCALE, (), np.float32)),
        (optax.lamb(0.1), Unit(KERNEL, (48, 33), np.float32)),
    ],
    ids=["exp", "power", "float16_gradient", "float16_state", "scalar", "lamb"],
)
def test_what_has_no_counterpart_is_left_to_its_executable(tx, unit):
    assert looped_updates(separate(tx, PARAMS), [unit], device=CPU) == [None]


@pytest.mark.parametrize("wrong", ["add", "sub", "max"])
def test_a_loop_that_computes_something_else_is_found_out(monkeypatch, wrong):
    def mistaken(*arguments, **rest):
        loop = loop_of(*arguments, **rest)
        operations = list(loop.program.operations)
        # The product of the momentum and its decay.
        (position,) = [
            k for k, o in enumerate(operations) if o.name == "mul" and 2 in o.operands
        ]
        operations[position] = Operation(wrong, operations[position].operands)
        return replace(
            loop, program=replace(loop.program, operations=tuple(operations))
        )

    loop_of = looped.loop_of
    monkeypatch.setattr(looped, "loop_of", mistaken)
    separated = separate(optax.sgd(0.1, momentum=0.9), PARAMS)
    unit = Unit(KERNEL, (48, 33), np.float32)
    with pytest.warns(RuntimeWarning, match="update of 'kernel' computes something"):
        assert looped_updates(separated, [unit], device=CPU) == [None]


@pytest.mark.slow
def test_all_loops_are_compiled_beforehand():
    separated = separate(optax.lion(0.03), PARAMS)
    unit = Unit(BIAS, (16,), jnp.bfloat16, jnp.float16)
    (update,) = looped_updates(separated, [unit], device=CPU)
    update.compile()
    before = cpu.compiled.cache_info().misses
    arrays = [np.ones(16, np.float32) for _ in range(2)]
    update(FACTOR, [], np.ones(16, jnp.bfloat16), *arrays, np.zeros(16, np.float16))
    assert cpu.compiled.cache_info().misses == before


def test_leaves_of_all_shapes_are_tried_once(monkeypatch):
    tried = []
    compile_probe = looped.compile_probe

    def counting(separated, unit, **rest):
        tried.append(unit)
        return compile_probe(separated, unit, **rest)

    monkeypatch.setattr(looped, "compile_probe", counting)
    named = (KERNEL, "kernel"), (BIAS, "bias")
    units = [Unit(i, SHAPES[p], np.float32) for i, p in named]
    assert all(looped_updates(separate(optax.lion(0.1), PARAMS), units, device=CPU))
    assert len(tried) == 1


def test_an_unknown_processor_takes_the_way_without_loops(monkeypatch):
    separated = separate(optax.lion(1e-2), PARAMS)
    units = [Unit(KERNEL, SHAPES["kernel"], np.dtype(np.float32))]
    (known,) = looped_updates(separated, units, device=CPU)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert looped_updates(separated, units, device=CPU) == [None]
    assert known is not None
