"""Updates as one executable give what each gives alone, where their arrays were."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.marks import slow
from tests.unit.optim.test_update import OPTIMIZERS, SHAPES
from zinf.optim.joint import JointCompiler
from zinf.optim.separate import separate
from zinf.optim.update import (
    Unit,
    UnitPlacement,
    compile_advance,
    compile_placed_updates,
)


def compile_plainly(lowered):
    return lowered.compile()


def tree(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype("f") for k, s in SHAPES.items()}


class Case:
    """The element-wise updates of a transform, alone and together.

    If `is_divided`, arrays that 8 devices can divide lie on them in parts.
    """

    def __init__(self, name, compute_dtype=None, is_divided=False):
        self.separated = separated = separate(OPTIMIZERS[name], tree(0))
        self.leaves = {
            leaf.path: i
            for i, leaf in enumerate(separated.leaves)
            if leaf.is_elementwise
            and not (is_divided and (leaf.spec.shape or (1,))[0] % 8)
        }
        device = jax.devices()[0]
        self.scalars = self.place = SingleDeviceSharding(device)
        if is_divided:
            mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
            self.scalars = NamedSharding(mesh, PartitionSpec())
            self.place = NamedSharding(mesh, PartitionSpec("fsdp"))
        units, places = [], []
        for path, i in self.leaves.items():
            units.append(Unit(i, SHAPES[path], jnp.float32, compute_dtype))
            states = (self.place,) * len(separated.leaves[i].states)
            arrays = self.place, self.place, states, self.place
            places.append(UnitPlacement(self.scalars, *arrays))
        self.steps = compile_placed_updates(separated, units, places).steps
        self.joint = JointCompiler(compile_plainly)(self.steps)
        self.advance = compile_advance(separated, device=device)
        self.shared = [s.value for s in separated.shared]

    def step_values(self):
        self.shared, values = self.advance(self.shared)
        return [jax.device_put(x, self.scalars) for x in values]

    def arrays(self):
        """Of each leaf the master and the states, in memory of XLA's own."""
        params = tree(0)
        return [
            [
                jax.device_put(x, self.place) + 0
                for x in (params[path], *self.separated.init_state(i, params[path]))
            ]
            for path, i in self.leaves.items()
        ]

    def grads(self, seed):
        found = tree(seed)
        return [jax.device_put(found[path], self.place) for path in self.leaves]


@pytest.mark.parametrize(
    ("name", "compute_dtype", "is_divided"),
    [
        ("adamw_cosine", "bfloat16", False),
        ("adamw_cosine", None, True),
        ("conditional", None, False),
        ("multi_transform", None, False),
        # Updates that need whole leaves run alone.
        slow(("muon", None, False)),
        slow(("adamw_bf16_moment", "bfloat16", True)),
    ],
)
def test_it_gives_the_bits_of_each_alone(name, compute_dtype, is_divided):
    case = Case(name, compute_dtype, is_divided)
    alone, together = case.arrays(), case.arrays()
    num_kept = [len(own) for own in alone]
    factor = np.float32(0.37)
    # Adam's bias corrections, which plain SGD does not read.
    read = {k for step in case.steps for k in step.step_values}
    assert set(case.joint.step_values) == read
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
    case, compiler = Case("adamw_cosine"), JointCompiler(compile_plainly)
    step = dict(zip(case.leaves, case.steps, strict=True))
    first, second, other = (
        compiler([step[f"blocks/{i}/{name}"] for name in names]).executable
        for i, names in (
            (0, ("bias", "kernel")),
            (1, ("bias", "kernel")),
            (0, ("kernel", "bias")),
        )
    )
    assert first is second is not other
