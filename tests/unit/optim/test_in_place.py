"""Updates in place give the numbers of the executables whose place they take."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.optim import in_place
from zinf.optim.in_place import in_place_updates
from zinf.optim.separate import separate
from zinf.optim.update import Unit, compile_advance, compile_updates
from zinf_kernels.adam import cpu

NUM_STEPS = 5
FACTOR = np.float32(0.37)
CPU = jax.devices("cpu")[0]
SHAPES = {"kernel": (48, 33), "other": (48, 33), "bias": (16,), "scale": ()}
PARAMS = {path: jax.ShapeDtypeStruct(s, np.float32) for path, s in SHAPES.items()}
KERNEL, OTHER, BIAS, SCALE = (sorted(SHAPES).index(p) for p in SHAPES)
NAMED = [(KERNEL, "kernel"), (OTHER, "other"), (BIAS, "bias")]
LABELS = {path: "b" if path == "other" else "a" for path in SHAPES}
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1, eps_root=1e-10),
    "scheduled": optax.adamw(optax.cosine_decay_schedule(1e-2, NUM_STEPS)),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(1e-2),
    "short_moment": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "two_rates": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.adam(0.3)}, LABELS
    ),
}
DTYPES = {
    "float32": (np.float32, None),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    # Accumulated in float32, as gradients of several microbatches are.
    "accumulated": (np.float32, jnp.float16),
}


def both(tx, units):
    separated = separate(tx, PARAMS)
    steps = compile_updates(separated, units, device=CPU).steps
    return separated, steps, in_place_updates(separated, units, device=CPU)


def random_like(specs, seed, scale=1.0):
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal(s.shape) * scale).astype(np.float32).astype(s.dtype)
        for s in specs
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_have_the_bits_of_their_executables(name, dtypes):
    gradient_dtype, compute_dtype = map(DTYPES[dtypes].__getitem__, (0, 1))
    units = [Unit(i, SHAPES[p], gradient_dtype, compute_dtype) for i, p in NAMED]
    separated, steps, updates = both(OPTIMIZERS[name], units)
    advance = compile_advance(separated, device=CPU)
    for unit, step, update in zip(units, steps, updates, strict=True):
        leaf = separated.leaves[unit.leaf]
        master, *states = random_like([leaf.spec, *(s.spec for s in leaf.states)], 0)
        found = [master, *(np.zeros_like(s) for s in states)]
        copies = [] if compute_dtype is None else [master.astype(compute_dtype)]
        found += copies
        expected = [x.copy() for x in found]
        shared = [s.value for s in separated.shared]
        for n in range(NUM_STEPS):
            shared, values = advance(shared)
            spec = jax.ShapeDtypeStruct(unit.shape, gradient_dtype)
            (gradient,) = random_like([spec], n + 1)
            update(FACTOR, values, gradient, *found)
            operands = jax.device_put(expected[: 1 + len(states)], CPU)
            expected = list(map(np.array, step(FACTOR, values, gradient, *operands)))
        chex.assert_trees_all_equal(found, expected, strict=True)


def test_a_block_has_the_bits_of_the_whole():
    units = [Unit(KERNEL, (rows, 33), np.float32) for rows in (48, 7, 41)]
    *_, (whole, first, last) = both(optax.adam(0.1), units)
    specs = [jax.ShapeDtypeStruct((48, 33), np.float32)] * 2
    gradient, master = random_like(specs, 0)
    wholes = [master, np.zeros_like(master), np.zeros_like(master)]
    blocks = [x.copy() for x in wholes]
    values = [np.float32(0.1), np.float32(0.001)]
    whole(FACTOR, values, gradient, *wholes)
    first(FACTOR, values, gradient[:7], *(x[:7] for x in blocks))
    last(FACTOR, values, gradient[7:], *(x[7:] for x in blocks))
    chex.assert_trees_all_equal(wholes, blocks, strict=True)


@pytest.mark.parametrize(
    "unit",
    [Unit(KERNEL, (48, 33), jnp.float16, jnp.float16), Unit(SCALE, (), np.float32)],
    ids=["float16_gradient", "scalar"],
)
def test_what_has_no_promise_is_left_to_its_executable(unit):
    *_, (found,) = both(optax.adam(0.1), [unit])
    assert found is None


def test_another_optimizer_is_left_to_its_executable():
    *_, (found,) = both(optax.lion(0.1), [Unit(KERNEL, (48, 33), np.float32)])
    assert found is None


def test_only_what_is_adam_of_a_mixed_optimizer_is_in_place():
    tx = optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, LABELS)
    units = [Unit(i, SHAPES[p], np.float32) for i, p in NAMED]
    *_, found = both(tx, units)
    assert [x is not None for x in found] == [True, False, True]


@pytest.mark.parametrize("field", ["b1", "eps", "learning_rate", "weight_decay"])
def test_an_update_that_only_looks_like_adam_is_found_out(monkeypatch, field):
    def wrong(body):
        form = match_adam(body)
        number = np.float32(form.scalars[field] * np.float32(1.5))
        return replace(form, scalars={**form.scalars, field: number})

    match_adam = in_place.match_adam
    monkeypatch.setattr(in_place, "match_adam", wrong)
    tx = optax.adamw(0.1, eps=0.1, weight_decay=0.1)
    with pytest.warns(RuntimeWarning, match="'kernel' looks like Adam"):
        *_, (found,) = both(tx, [Unit(KERNEL, (48, 33), np.float32)])
    assert found is None


def test_moments_in_each_others_place_are_found_out(monkeypatch):
    def wrong(body):
        form = match_adam(body)
        return replace(form, m=form.v, v=form.m)

    match_adam = in_place.match_adam
    monkeypatch.setattr(in_place, "match_adam", wrong)
    with pytest.warns(RuntimeWarning, match="looks like Adam"):
        *_, (found,) = both(optax.adam(0.1), [Unit(KERNEL, (48, 33), np.float32)])
    assert found is None


def test_all_loops_are_compiled_beforehand():
    tx = optax.inject_hyperparams(optax.adamw)(1e-2)
    units = [Unit(BIAS, (16,), jnp.bfloat16, jnp.float16)]
    separated, _, (update,) = both(tx, units)
    update.compile()
    before = cpu.compiled.cache_info().misses
    values = [np.float32(0.5) for _ in separated.step_value_specs]
    decay = update.form.scalars["weight_decay"]
    arrays = [np.ones(16, np.float32) for _ in range(3)]
    for number in (0, 0.1):
        values[decay] = np.float32(number)
        gradient = np.ones(16, jnp.bfloat16)
        update(FACTOR, values, gradient, *arrays, np.zeros(16, np.float16))
    assert cpu.compiled.cache_info().misses == before


def test_leaves_of_all_shapes_are_tried_once(monkeypatch):
    tried = []
    compile_probe = in_place.compile_probe

    def counting(separated, unit, **rest):
        tried.append(unit)
        return compile_probe(separated, unit, **rest)

    monkeypatch.setattr(in_place, "compile_probe", counting)
    units = [Unit(i, SHAPES[p], np.float32) for i, p in NAMED]
    assert all(both(optax.adam(0.1), units)[2])
    assert len(tried) == 1
