"""Updates as one executable give what each gives alone, where their arrays were."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.unit.optim.test_update import OPTIMIZERS, SHAPES
from zinf.core.optim.joint import JointCompiler
from zinf.core.optim.separate import separate
from zinf.core.optim.update import Unit, compile_advance, compile_updates

DEVICE = jax.devices()[0]
FACTOR = np.float32(0.37)


def compiler():
    return JointCompiler(lambda lowered: lowered.compile())


def gradients(paths, seed):
    rng = np.random.default_rng(seed)
    tree = {k: rng.normal(size=s).astype("f") for k, s in SHAPES.items()}
    return [jax.device_put(tree[path], DEVICE) for path in paths]


def case(name, compute_dtype=None):
    """The element-wise updates of a transform: what they are, and their arrays."""
    params = dict(zip(SHAPES, map(np.asarray, gradients(SHAPES, 0)), strict=True))
    separated = separate(OPTIMIZERS[name], params)
    leaves = {x.path: i for i, x in enumerate(separated.leaves) if x.is_elementwise}
    units = [Unit(i, SHAPES[p], jnp.float32, compute_dtype) for p, i in leaves.items()]
    steps = compile_updates(separated, units, device=DEVICE).steps
    # Of each leaf the master and the states, in memory of XLA's own.
    arrays = [
        [
            jax.device_put(x, DEVICE) + 0
            for x in (params[p], *separated.init_state(i, params[p]))
        ]
        for p, i in leaves.items()
    ]
    return separated, dict(zip(leaves, steps, strict=True)), arrays


@pytest.mark.parametrize(
    ("name", "compute_dtype"),
    [
        ("adamw_cosine", "bfloat16"),
        ("conditional", None),
        ("two_adams", None),
        # Updates that need whole leaves run alone.
        slow(("muon", None)),
        slow(("adamw_bf16_moment", None)),
    ],
)
def test_it_gives_the_bits_of_each_alone(name, compute_dtype):
    separated, steps, alone = case(name, compute_dtype)
    together = jax.tree.map(lambda x: x + 0, alone)
    joint = compiler()([*steps.values()])
    # Each of two kinds of Adam reads bias corrections of its own.
    assert set(joint.step_values) == {k for s in steps.values() for k in s.step_values}
    num_kept = [len(own) for own in alone]
    advance = compile_advance(separated, device=DEVICE)
    shared = [s.value for s in separated.shared]
    for seed in range(1, 4):
        shared, values = advance(shared)
        grads = gradients(steps, seed)
        results = [
            step(FACTOR, values, grad, *own)
            for step, grad, own in zip(steps.values(), grads, alone, strict=True)
        ]
        found = joint(FACTOR, values, grads, together)
        chex.assert_trees_all_equal(results, found, strict=True)
        alone, together = (
            [list(r[:n]) for r, n in zip(made, num_kept, strict=True)]
            for made in (results, found)
        )


def test_results_are_where_the_arrays_were_unless_somebody_looks_at_them():
    separated, steps, arrays = case("adamw_cosine")
    grads = gradients(steps, 1)
    places = [[x.unsafe_buffer_pointer() for x in own] for own in arrays]
    view = np.asarray(arrays[0][0])
    before = view.copy()
    advance = compile_advance(separated, device=DEVICE)
    _, values = advance([s.value for s in separated.shared])
    found = compiler()([*steps.values()])(FACTOR, values, grads, arrays)
    jax.block_until_ready(found)
    now = [[x.unsafe_buffer_pointer() for x in own] for own in found]
    assert now[0][0] != places[0][0]
    now[0][0] = places[0][0]
    assert now == places
    np.testing.assert_array_equal(view, before)
    assert all(x.is_deleted() for own in arrays[1:] for x in own)
    assert not any(x.is_deleted() for x in grads)


def test_equal_groups_share_an_executable():
    _, steps, _ = case("adamw_cosine")
    compile_jointly = compiler()
    first, second, other = (
        compile_jointly([steps[f"blocks/{i}/{name}"] for name in names]).executable
        for i, names in [(0, ("bias", "kernel")), (1, ("bias", "kernel"))]
        + [(0, ("kernel", "bias"))]
    )
    assert first is second is not other
