"""Updates on the host give the numbers of the executables whose place they take."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.marks import slow
from zinf.core.optim import host_updates
from zinf.core.optim.host import chunked, looped
from zinf.core.optim.host.chunked import ChunkedUpdate, chunked_updates
from zinf.core.optim.host.looped import LoopedUpdate, looped_updates
from zinf.core.optim.separate import separate
from zinf.core.optim.transforms.rules import scale_by_adagrad
from zinf.core.optim.update import Unit, compile_advance, compile_updates
from zinf_kernels import elementwise
from zinf_kernels.elementwise.bounds import error_bounds

NUM_STEPS = 4
FACTOR = np.float32(0.37)
CPU = jax.devices("cpu")[0]
CHUNK = 1024
# Of a kernel the last piece is short; "pieces" has whole ones, and "piece" is one.
SHAPES = {
    "bias": (16,),
    "kernel": (48, 33),
    "piece": (CHUNK,),
    "pieces": (4, CHUNK),
    "scale": (),
}
PARAMS = {path: jax.ShapeDtypeStruct(s, np.float32) for path, s in SHAPES.items()}
LABELS = {path: "b" if path == "bias" else "a" for path in SHAPES}
RATE = optax.cosine_decay_schedule(1e-2, 2 * NUM_STEPS)
TWO_RATES = {"a": optax.adam(1e-2), "b": optax.adam(0.3)}
ADAM = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1, eps_root=1e-10),
    "scheduled": optax.adamw(RATE),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(1e-2),
    "short_moment": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "two_rates": optax.multi_transform(TWO_RATES, LABELS),
}
SAME_BITS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(RATE),
    "short_lion": optax.lion(1e-2, mu_dtype=jnp.bfloat16),
    "hyper_lion": optax.inject_hyperparams(optax.lion)(1e-2),
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
OPTIMIZERS = ADAM | SAME_BITS | WITHIN_BOUNDS
DTYPES = {
    "float32": (np.float32, None),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    # Accumulated in float32, as gradients of several microbatches are.
    "accumulated": (np.float32, jnp.float16),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_NUMEL", CHUNK)


def unit_of(path, grad_dtype=np.float32, compute_dtype=None):
    return Unit(sorted(SHAPES).index(path), SHAPES[path], grad_dtype, compute_dtype)


def normal(shape, dtype, seed):
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 0.3).astype(np.float32).astype(dtype)


def steps_of(updates_of, name, dtypes, path):
    """Of each step: the update, and arrays before and after it by two ways."""
    grad_dtype, compute_dtype = DTYPES[dtypes]
    separated = separate(OPTIMIZERS[name], PARAMS)
    unit = unit_of(path, grad_dtype, compute_dtype)
    (step,) = compile_updates(separated, [unit], device=CPU).steps
    (update,) = updates_of(separated, [unit], device=CPU)
    advance = compile_advance(separated, device=CPU)
    master = normal(unit.shape, np.float32, 0)
    found = [master, *map(np.array, separated.init_state(unit.leaf, master))]
    num_operands = len(found)
    found += [] if compute_dtype is None else [master.astype(compute_dtype)]
    shared = [s.value for s in separated.shared]
    for n in range(NUM_STEPS):
        shared, values = advance(shared)
        gradient = normal(unit.shape, grad_dtype, n + 1)
        before = [gradient, *(x.copy() for x in found)]
        operands = jax.device_put(before[1 : 1 + num_operands], CPU)
        expected = list(map(np.array, step(FACTOR, values, gradient, *operands)))
        update(FACTOR, values, gradient, *found)
        yield update, values, before, found, expected


# Each name with one of the dtypes in turn.
LOOPED = [
    (looped_updates, n, d, "kernel")
    for n, d in zip(SAME_BITS, 5 * [*DTYPES], strict=True)
]
FAST = ("nesterov", "lion", "adamax", "rprop")


@pytest.mark.parametrize(
    ("updates_of", "name", "dtypes", "path"),
    [
        (looped_updates, "adam", "bfloat16", "kernel"),
        (looped_updates, "adamw", "float32", "kernel"),
        (looped_updates, "hyperparams", "bfloat16", "bias"),
        (looped_updates, "scheduled", "float32", "pieces"),
        (looped_updates, "short_moment", "accumulated", "kernel"),
        (looped_updates, "two_rates", "float32", "bias"),
        *(case if case[1] in FAST else slow(case) for case in LOOPED),
        (chunked_updates, "adamw", "bfloat16", "kernel"),
        (chunked_updates, "rmsprop", "float32", "pieces"),
    ],
)
def test_updates_have_the_bits_of_their_executables(updates_of, name, dtypes, path):
    for *_, found, expected in steps_of(updates_of, name, dtypes, path):
        chex.assert_trees_all_equal(found, expected, strict=True)


@pytest.mark.parametrize("name", ["rmsprop", *map(slow, [*WITHIN_BOUNDS][1:])])
def test_others_are_as_near_as_rounding_lets_them(name):
    """Each step from the same arrays; two implementations may be two bounds apart."""
    steps = steps_of(looped_updates, name, "float32", "kernel")
    for update, values, before, found, expected in steps:
        arrays = [x.reshape(-1) for x in before]
        scalars = update.scalars(FACTOR, values)
        bounds = error_bounds(update.loop.program, arrays, scalars)
        for x, y, bound in zip(found, expected, bounds, strict=True):
            difference = np.abs(x.astype(float) - y.astype(float)).reshape(-1)
            assert np.all(difference <= 2 * bound)
            # A matter of last places.
            largest = np.abs(y.astype(float)).max()
            assert np.all(bound <= 2.0**-19 * largest + 4 * 2.0**-126)


def test_pieces_share_an_executable_and_need_room_for_one_of_them():
    separated = separate(OPTIMIZERS["rmsprop"], PARAMS)
    units = [unit_of("kernel"), unit_of("pieces")]
    updates = chunked_updates(separated, units, device=CPU)
    assert updates[0].step.executable is updates[1].step.executable
    # A gradient, a parameter and two states, and new ones of the latter; XLA has a few
    # pointers beside them.
    arrays_bytes = 4 * CHUNK * (4 + 3)
    for update in updates:
        assert arrays_bytes <= update.workspace_bytes < arrays_bytes + 64


EXPONENTIAL = optax.stateless(lambda g, _: jax.tree.map(jnp.exp, g))
POWER = optax.stateless(lambda g, _: jax.tree.map(lambda x: x**-2, g))
SHORT_LION = optax.lion(0.1, mu_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("updates_of", "tx", "unit"),
    [
        (looped_updates, POWER, unit_of("kernel")),
        (looped_updates, optax.lion(0.1), unit_of("kernel", jnp.float16, jnp.float16)),
        (looped_updates, SHORT_LION, unit_of("kernel")),
        (looped_updates, optax.adam(0.1), unit_of("kernel", jnp.float16)),
        (looped_updates, optax.adam(0.1), unit_of("scale")),
        (chunked_updates, optax.lion(0.1), unit_of("piece")),
        (chunked_updates, optax.lion(0.1), unit_of("kernel", np.float16)),
    ],
)
def test_what_has_no_counterpart_is_left_to_its_executable(updates_of, tx, unit):
    assert updates_of(separate(tx, PARAMS), [unit], device=CPU) == [None]


@pytest.mark.parametrize(
    ("tx", "path", "way"),
    [
        (optax.adamw(0.1), "bias", LoopedUpdate),
        (optax.lion(0.1), "bias", LoopedUpdate),
        (optax.rmsprop(0.1), "kernel", LoopedUpdate),
        (EXPONENTIAL, "kernel", ChunkedUpdate),
        (EXPONENTIAL, "bias", type(None)),
        (optax.lamb(0.1), "kernel", type(None)),
    ],
)
def test_updates_take_the_fastest_way_that_serves(tx, path, way):
    (found,) = host_updates(separate(tx, PARAMS), [unit_of(path)], device=CPU)
    assert type(found) is way


def test_a_loop_that_computes_something_else_is_found_out(monkeypatch):
    def mistaken(*arguments, **rest):
        loop = loop_of(*arguments, **rest)
        # The product of the momentum and its decay.
        operations = tuple(
            replace(o, name="max") if o.name == "mul" and 2 in o.operands else o
            for o in loop.program.operations
        )
        return replace(loop, program=replace(loop.program, operations=operations))

    loop_of = looped.loop_of
    monkeypatch.setattr(looped, "loop_of", mistaken)
    separated = separate(OPTIMIZERS["momentum"], PARAMS)
    with pytest.warns(RuntimeWarning, match="update of 'kernel' computes something"):
        assert looped_updates(separated, [unit_of("kernel")], device=CPU) == [None]


@pytest.mark.parametrize("name", ["hyperparams", "hyper_lion"])
def test_all_loops_are_compiled_beforehand(name):
    """One serves all weight decays, also where the decay is a step value and zero."""
    separated = separate(OPTIMIZERS[name], PARAMS)
    unit = unit_of("bias", jnp.bfloat16, jnp.float16)
    (update,) = looped_updates(separated, [unit], device=CPU)
    update.compile()
    before = elementwise.cpu.compiled.cache_info().misses
    num_arrays = 1 + len(separated.leaves[unit.leaf].states)
    gradient, copy = np.ones(16, jnp.bfloat16), np.zeros(16, np.float16)
    for value in np.float32([0, 0.5]):
        values = [value for _ in separated.step_value_specs]
        update(FACTOR, values, gradient, *np.ones((num_arrays, 16), "f"), copy)
    assert elementwise.cpu.compiled.cache_info().misses == before


def test_an_unknown_processor_takes_the_way_without_loops(monkeypatch):
    separated = separate(optax.lion(1e-2), PARAMS)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert looped_updates(separated, [unit_of("kernel")], device=CPU) == [None]
