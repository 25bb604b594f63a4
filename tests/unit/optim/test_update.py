"""Leaf-by-leaf updates give the numbers of plain optax, whole and by blocks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.marks import slow
from zinf.core.optim.separate import separate
from zinf.core.optim.update import Unit, compile_advance, compile_updates
from zinf.core.segment import named_leaves

NUM_STEPS = 6
CPU = jax.devices()[0]
SHAPES = {
    "blocks/0/bias": (16,),
    "blocks/0/kernel": (24, 16),
    "blocks/1/bias": (16,),
    "blocks/1/kernel": (24, 16),
    "scale": (),
    "stacked": (3, 8, 16),
}
LABELS = {path: "adam" if "kernel" in path else "sgd" for path in SHAPES}


def matrices(params):
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def cosine(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 2, 10)


# Each way to update: by element, by leaf, with schedules, masks and several transforms.
FAST = ("adamw_cosine", "lamb", "muon", "partition_frozen")
# One line an optimizer. Muon stacks, adafactor and lamb need whole leaves.
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw_cosine": optax.adamw(cosine(1e-2)),
    "adamw_bf16_moment": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "lion": optax.lion(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "novograd": optax.novograd(1e-2),
    "madgrad": optax.contrib.madgrad(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "two_adams": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.adam(0.1, b1=0.5)}, LABELS
    ),
    "partition_frozen": optax.partition(
        {"adam": optax.adamw(1e-2), "sgd": optax.set_to_zero()}, LABELS
    ),
    "masked_decay": optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(cosine(1e-2)),
    "chain": optax.chain(
        optax.add_decayed_weights(0.01),
        optax.scale_by_adam(),
        optax.scale_by_schedule(cosine(1e-2)),
        optax.scale(-1.0),
    ),
    "array_rate": optax.chain(optax.clip(0.5), optax.sgd(jnp.asarray(0.1))),
    "conditional": optax.conditionally_transform(optax.adam(0.1), lambda n: n > 2),
}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)

    def tree():
        return {k: rng.normal(size=s).astype("f") for k, s in SHAPES.items()}

    return tree(), [tree() for _ in range(NUM_STEPS)]


def plain(tx, data):
    params, gradients = data

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for grads in gradients:
        params, state = step(params, state, grads)
    return params, named_leaves(state)


def rows(shape, num_rows):
    """Slices of the leading dim; the whole of a leaf where `num_rows` is None."""
    # A block of one entry has no loop, and XLA rounds some of its sums otherwise.
    if num_rows is None or len(shape) < 2:
        return [...]
    return [slice(k, k + num_rows) for k in range(0, shape[0], num_rows)]


def streamed(tx, data, *, num_rows=None):
    """The same steps leaf by leaf, and in blocks of rows where that is allowed."""
    params, gradients = data
    separated = separate(tx, params)
    # Of each block the number of its leaf, the path, and its rows.
    work = [
        (i, leaf.path, part)
        for i, leaf in enumerate(separated.leaves)
        for part in rows(leaf.spec.shape, num_rows if leaf.is_elementwise else None)
    ]
    masters = [params[path][part] for _, path, part in work]
    leaves = [i for i, _, _ in work]
    units = [
        Unit(i, x.shape, jnp.float32) for i, x in zip(leaves, masters, strict=True)
    ]
    states = [*map(separated.init_state, leaves, masters)]
    updates = compile_updates(separated, units, device=CPU)
    advance = compile_advance(separated, device=CPU)
    shared = [s.value for s in separated.shared]
    for grads in gradients:
        shared, values = advance(shared)
        for n, (_, path, part) in enumerate(work):
            masters[n], *states[n] = updates.steps[n](
                np.float32(1), values, grads[path][part], masters[n], *states[n]
            )
    names = [s.optax_path for s in separated.shared]
    new_params, new_states = {}, {}
    for i, leaf in enumerate(separated.leaves):
        mine = [n for n, j in enumerate(leaves) if j == i]
        new_params[leaf.path] = joined([masters[n] for n in mine])
        for k, state in enumerate(leaf.states):
            new_states[state.optax_path] = joined([states[n][k] for n in mine])
    return new_params, new_states, dict(zip(names, shared, strict=True))


def joined(parts):
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


@pytest.mark.parametrize("name", [n if n in FAST else slow(n) for n in OPTIMIZERS])
def test_streamed_updates_equal_plain_optax(name, data):
    found, found_states, shared = streamed(OPTIMIZERS[name], data)
    params, states = plain(OPTIMIZERS[name], data)

    def assert_near(found, wanted, tolerance):
        atol = tolerance * np.max(np.abs(wanted), initial=1e-30)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=path)

    for path, wanted in params.items():
        # XLA fuses a multiply and an add into one rounding where they meet in a loop,
        # and the loops of the whole update are not those of one leaf: about one unit
        # in the last place (1.2e-7) a step, of the largest entry.
        assert_near(found[path], wanted, NUM_STEPS * 1.2e-7)
    for path, value in shared.items():
        np.testing.assert_allclose(value, states[path], rtol=1e-6, err_msg=path)
    for path, value in found_states.items():
        assert value.dtype == states[path].dtype
        assert_near(value, states[path], 0.01 if value.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("adamw_cosine", 5), ("masked_decay", 1), slow(("lion", 1)), ("adafactor", 5)],
)
def test_blocks_of_rows_give_the_bits_of_the_whole_leaf(name, num_rows, data):
    whole = streamed(OPTIMIZERS[name], data)
    blocks = streamed(OPTIMIZERS[name], data, num_rows=num_rows)
    chex.assert_trees_all_equal(blocks, whole, strict=True)


def test_noise_is_that_of_optax_with_plain_numbers_for_its_key(data):
    names = ["blocks/0/bias", "scale"]
    params, gradients = ({k: tree[k] for k in names} for tree in (data[0], data[1][0]))
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    few = params, [gradients] * 3
    found, _, shared = streamed(tx, few)
    wanted, states = plain(tx, few)
    for path in names:
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-6)
    key = jax.random.key_data(states["0/rng_key"])
    np.testing.assert_array_equal(shared["0/rng_key"], key)


def kernel_units(num_leaves, **unit):
    spec = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    separated = separate(optax.adamw(1e-2), {f"{i}": spec for i in range(num_leaves)})
    units = [Unit(i, (8, 4), jnp.float32, **unit) for i in range(num_leaves)]
    return separated, units


def test_equal_units_share_one_executable():
    """A block shape, a dtype or a copy of its own makes another."""
    separated, units = kernel_units(40)
    updates = compile_updates(separated, units, device=CPU)
    assert (updates.num_executables, len(updates.steps)) == (1, 40)
    units = [
        *units[:2],
        Unit(0, (3, 4), jnp.float32),
        Unit(1, (3, 4), jnp.float32),
        Unit(0, (8, 4), jnp.bfloat16),
        Unit(0, (8, 4), jnp.float32, jnp.bfloat16),
        # No copy: it would be the master.
        Unit(1, (8, 4), jnp.float32, jnp.float32),
    ]
    assert compile_updates(separated, units, device=CPU).num_executables == 4


def sgd_step(rate, size, grad_dtype=jnp.float32, copy=None, dtype=jnp.float32):
    separated = separate(optax.sgd(rate), {"w": jnp.zeros((size,), dtype)})
    units = [Unit(0, (size,), grad_dtype, copy)]
    return compile_updates(separated, units, device=CPU).steps[0]


def test_the_compute_copy_is_the_new_master_rounded_and_masters_keep_their_dtype():
    grad, master = np.random.default_rng(0).normal(size=(2, 64)).astype("f")
    (new,) = sgd_step(0.1, 64)(np.float32(1), [], grad, master)
    step = sgd_step(0.1, 64, copy=jnp.bfloat16)
    same, copy = step(np.float32(1), [], grad, master)
    np.testing.assert_array_equal(new, same)
    np.testing.assert_array_equal(copy, new.astype(jnp.bfloat16))
    short = sgd_step(1.0, 3, dtype=jnp.bfloat16)
    (new,) = short(np.float32(1), [], np.ones(3, "f"), np.ones(3, jnp.bfloat16))
    assert new.dtype == jnp.bfloat16 and not new.any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients_are_scaled_in_float32(dtype):
    # Float16 ends at 2**-24.
    grad = np.array([1.0, 1.5, -2.0], dtype)
    factor, zeros = np.float32(2.0**-30), np.zeros(3, np.float32)
    (new,) = sgd_step(1.0, 3, dtype)(factor, [], grad, zeros)
    np.testing.assert_array_equal(new, -grad.astype("f") * factor)


def test_updates_run_on_their_device_and_say_what_they_allocate():
    separated, units = kernel_units(1, compute_dtype=jnp.bfloat16)
    device = jax.devices()[-1]
    (step,) = compile_updates(separated, units, device=device).steps
    _, values = compile_advance(separated, device=device)(
        [s.value for s in separated.shared]
    )
    outputs = step(np.float32(1), values, *[np.ones((8, 4), np.float32)] * 4)
    chex.assert_tree_is_on_device(outputs, device=device)
    # Master and two moments in float32, the compute copy in bfloat16.
    assert step.output_bytes >= 8 * 4 * (3 * 4 + 2)
    assert step.workspace_bytes == step.output_bytes + step.temp_bytes
