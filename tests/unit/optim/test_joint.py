"""Updates as one executable give what each gives alone, where their arrays were."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.marks import slow
from tests.unit.optim.test_update import OPTIMIZERS, SHAPES
from zinf.optim.joint import JointCompiler
from zinf.optim.separate import separate
from zinf.optim.update import (
    Unit,
    UnitPlacement,
    compile_advance,
    compile_placed_updates,
    compile_updates,
)


def compile_plainly(lowered):
    return lowered.compile()


def tree(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype("f") for k, s in shapes.items()}


class Case:
    """The element-wise updates of a transform, alone and together."""

    def __init__(self, name, compute_dtype=None):
        separated = separate(OPTIMIZERS[name], tree(0))
        self.separated = separated
        self.leaves = {
            leaf.path: i
            for i, leaf in enumerate(separated.leaves)
            if leaf.is_elementwise
        }
        units = [
            Unit(i, SHAPES[path], jnp.float32, compute_dtype)
            for path, i in self.leaves.items()
        ]
        device = jax.devices()[0]
        self.steps = compile_updates(separated, units, device=device).steps
        self.joint = JointCompiler(compile_plainly)(self.steps)
        self.advance = compile_advance(separated, device=device)
        self.shared = [s.value for s in separated.shared]

    def step_values(self):
        self.shared, values = self.advance(self.shared)
        return values

    def arrays(self):
        """Of each leaf the master and the states, in memory of XLA's own."""
        params = tree(0)
        made = []
        for path, i in self.leaves.items():
            states = self.separated.init_state(i, params[path])
            made.append([jnp.asarray(x) + 0 for x in (params[path], *states)])
        return made

    def grads(self, seed):
        found = tree(seed)
        return [jnp.asarray(found[path]) for path in self.leaves]


@pytest.mark.parametrize(
    ("name", "compute_dtype"),
    [
        ("adamw_cosine", "bfloat16"),
        ("conditional", None),
        ("multi_transform", None),
        # Updates that need whole leaves run alone.
        slow(("muon", None)),
        slow(("adamw_bf16_moment", None)),
        slow(("lion", "bfloat16")),
        slow(("madgrad", None)),
    ],
)
def test_it_gives_the_bits_of_each_alone(name, compute_dtype):
    case = Case(name, compute_dtype)
    alone, together = case.arrays(), case.arrays()
    num_kept = [len(own) for own in alone]
    factor = np.float32(0.37)
    for seed in range(1, 4):
        grads, values = case.grads(seed), case.step_values()
        results = [
            step(factor, values, grad, *own)
            for step, grad, own in zip(case.steps, grads, alone, strict=True)
        ]
        found = case.joint(factor, values, grads, together)
        chex.assert_trees_all_equal(results, found, strict=True)
        alone = [list(r[:n]) for r, n in zip(results, num_kept, strict=True)]
        together = [list(r[:n]) for r, n in zip(found, num_kept, strict=True)]


def test_arrays_on_several_devices_have_the_bits_of_each_alone():
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    whole, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("fsdp",)))
    shapes = {"a": (24,), "b": (16,), "c": (16, 4)}
    params, grads = tree(0, shapes), [*tree(1, shapes).values()]
    separated = separate(optax.adamw(1e-2), params)
    units = [Unit(i, s, jnp.float32, None) for i, s in enumerate(shapes.values())]
    places = [
        UnitPlacement(whole, cut, cut, (cut,) * len(leaf.states), cut)
        for leaf in separated.leaves
    ]
    steps = compile_placed_updates(separated, units, places).steps
    joint = JointCompiler(compile_plainly)(steps)
    advance = compile_advance(separated, device=jax.devices()[0])
    _, values = advance([s.value for s in separated.shared])
    values = [jax.device_put(np.asarray(x), whole) for x in values]
    arrays = [
        [params[leaf.path], *separated.init_state(i, params[leaf.path])]
        for i, leaf in enumerate(separated.leaves)
    ]

    def on_devices(tree):
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), cut) + 0, tree)

    grads = on_devices(grads)
    rest = np.float32(0.37), values
    alone = [
        step(*rest, grad, *own)
        for step, grad, own in zip(steps, grads, on_devices(arrays), strict=True)
    ]
    found = joint(*rest, grads, on_devices(arrays))
    chex.assert_trees_all_equal(alone, found, strict=True)


def test_results_are_where_the_arrays_were_unless_somebody_looks_at_them():
    case = Case("adamw_cosine")
    arrays, grads = case.arrays(), case.grads(1)
    places = [[x.unsafe_buffer_pointer() for x in own] for own in arrays]
    view = np.asarray(arrays[0][0])
    before = view.copy()
    found = case.joint(np.float32(1), case.step_values(), grads, arrays)
    jax.block_until_ready(found)
    now = [[x.unsafe_buffer_pointer() for x in own] for own in found]
    assert now[0][0] != places[0][0]
    now[0][0] = places[0][0]
    assert now == places
    np.testing.assert_array_equal(view, before)
    assert all(x.is_deleted() for own in arrays[1:] for x in own)
    assert not any(x.is_deleted() for x in grads)


def test_equal_groups_share_an_executable():
    case = Case("adamw_cosine")
    step = dict(zip(case.leaves, case.steps, strict=True))
    compiler = JointCompiler(compile_plainly)
    first, second = (
        compiler([step[f"blocks/{i}/bias"], step[f"blocks/{i}/kernel"]])
        for i in range(2)
    )
    other = compiler([step["blocks/0/kernel"], step["blocks/0/bias"]])
    assert first.executable is second.executable
    assert first.executable is not other.executable


def test_updates_that_read_other_step_values_run_together():
    """Adam's bias corrections, which plain SGD does not read."""
    case = Case("multi_transform")
    assert len({step.step_values for step in case.steps}) > 1
    read = {k for step in case.steps for k in step.step_values}
    assert set(case.joint.step_values) == read
