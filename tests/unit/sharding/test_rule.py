"""Which dim of an array is cut, and along which axes."""

from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.golden import Golden
from zinf.core.config.grouping import Grouping
from zinf.core.machine.devices import group_devices
from zinf.core.program import ArrayId, ArraySpec, Role
from zinf.core.sharding import axes, num_data_parallel, persistent_layouts
from zinf.core.sharding.encoding import Nibbles
from zinf.core.sharding.mesh import AXES, DIM_AXES, INNER_AXES, Dim, make_mesh
from zinf.core.sharding.rule import LANES, WIDE_BYTES, AxisRule, axis_rule
from zinf.core.sharding.signs import Momenta

NUM_SHARDS = 8
ITEM_BYTES = 4
NARROW = LANES * NUM_SHARDS // 2
MANY = WIDE_BYTES // ITEM_BYTES // NARROW


def test_every_inner_axis_has_a_row():
    assert axes.AXES.keys() == {axis.name for axis in INNER_AXES}
    assert DIM_AXES.keys() == set(Dim)


def rule(mesh: Any = None, **options: Any) -> AxisRule:
    """The rule of a mesh; the default is one group."""
    arguments = {"stage": 3, "min_bytes": 0, **options}
    return axis_rule(mesh or make_mesh(jax.devices()[:NUM_SHARDS]), **arguments)


RULE = rule()


def cut_dim(
    shape, *, made: AxisRule = RULE, has_layers: bool = False, may_pad: bool = True
) -> int | None:
    nbytes = ITEM_BYTES * prod(shape)
    return made.cut_dim(shape, nbytes, has_layers=has_layers, may_pad=may_pad)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 40), st.just(1 << 20)), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_a_dim_that_is_cut_gives_every_shard_some_of_it(shape, may_pad, has_layers):
    dim = cut_dim(shape, may_pad=may_pad, has_layers=has_layers)
    if dim is None:
        return
    assert shape[dim] > 1
    assert prod(shape) > NUM_SHARDS
    assert may_pad or shape[dim] % NUM_SHARDS == 0
    assert not has_layers or dim != 0


# By shape, the dim that is cut.
CUT = {
    # Rows are cut last.
    (16, 24): 1,
    (16, 24, 5): 1,
    (64,): 0,
    (16, 23): 0,
    (16, 1): 0,
    # The last dim is cut into whole lanes, or after others.
    (3, 16, 2 * NARROW): 1,
    (3, 5, 2 * NARROW): 2,
    (3, 16, NARROW): 1,
    (3, 5, NARROW): 2,
    # Of a large array rows are cut, if that makes the last dim narrow.
    (MANY, NARROW): 0,
    (MANY - NUM_SHARDS, NARROW): 1,
    (MANY, 2 * NARROW): 1,
    # The largest dim is padded.
    (3, 5, 23): 2,
    (3, 23, 5): 1,
    # There is something for every shard and more, or it is not cut.
    (NUM_SHARDS,): None,
    (NUM_SHARDS + 1,): 0,
    (): None,
}


def test_each_shape_is_cut_along_one_dim():
    assert {shape: cut_dim(shape) for shape in CUT} == CUT
    assert cut_dim((16, 23), has_layers=True) == 1
    assert cut_dim((MANY, NARROW), has_layers=True) == 1
    assert cut_dim((3, 23, 5), may_pad=False) is None
    nbytes = ITEM_BYTES * 16 * 16
    assert cut_dim((16, 16), made=rule(min_bytes=nbytes)) == 1
    assert cut_dim((16, 16), made=rule(min_bytes=nbytes + 1)) is None


def test_a_stage_says_what_is_cut_on_the_devices():
    order = [Role.MASTER, Role.GRADIENT, Role.PARAM]
    for stage in range(4):
        made = rule(stage=stage)
        assert [r for r in order if made.device_axes(r)] == order[:stage]
        assert made.device_axes(Role.STATE) == made.device_axes(Role.MASTER)


def test_groups_have_parameters_and_share_the_rest_or_are_copies():
    mesh = make_mesh(jax.devices()[:8], num_replicas=2)
    hpz = axis_rule(mesh, stage=3, min_bytes=0, gathers_in_group=True)
    assert hpz.device_axes("param") == ("fsdp",)
    assert hpz.device_axes("master") == ("replica", "fsdp")
    assert hpz.num_shards == 8
    mics = axis_rule(mesh, stage=3, min_bytes=0)
    assert mics.device_axes("param") == mics.device_axes("master") == ("fsdp",)
    assert mics.num_shards == 4


def mesh_of_processes(*shape: int) -> SimpleNamespace:
    """A mesh of 8 devices, of which two each are of one process."""
    devices = [SimpleNamespace(process_index=i // 2) for i in range(8)]
    return SimpleNamespace(
        shape=dict(zip(AXES, shape, strict=True)),
        axis_names=AXES,
        devices=np.array(devices, object).reshape(shape),
        size=len(devices),
    )


def test_meshes_and_groups_that_cannot_be_are_refused(golden: Golden):
    devices = jax.devices()[:8]
    divided = partial(make_mesh, devices, num_tensor=2)
    refused = [
        # Devices that do not divide into groups, and groups that have more than all.
        partial(group_devices, devices, Grouping(group_size=3)),
        partial(group_devices, devices, Grouping(group_size=16)),
        partial(group_devices, devices, Grouping(num_replicas=3)),
        partial(group_devices, devices, Grouping(2, inner={"tensor": 3, "seq": 2})),
        # What may not cross processes, and axes that do not go together.
        partial(rule, mesh_of_processes(2, 4, 1, 1, 1), gathers_in_group=True),
        lambda: rule(divided(num_seq=2)),
        lambda: rule(divided(), gradient_encoding=Nibbles()),
        lambda: rule(make_mesh(devices, num_replicas=8), gradient_encoding=Nibbles()),
        lambda: rule(
            divided(num_replicas=2), compression=Momenta("OneBitAdam", 0.9, 5)
        ),
    ]
    found = []
    for make in refused:
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            make()
        found.append(f"{caught.typename}: {caught.value}")
    golden.check("refused_meshes.txt", "\n".join(found))
    # Groups that hold no parameters, and sequences and weights in several processes.
    rule(mesh_of_processes(2, 4, 1, 1, 1))
    rule(mesh_of_processes(2, 4, 1, 1, 1), stage=2, gathers_in_group=True)
    rule(mesh_of_processes(1, 2, 4, 1, 1), stage=0)
    rule(mesh_of_processes(1, 2, 1, 1, 4), stage=0)


def layouts_of(made: AxisRule, shape, divided, *, names=("w",)):
    spec = ArraySpec(shape, "float32", ITEM_BYTES)
    roles = Role.PARAM, Role.MASTER
    specs = {ArrayId(role, name): spec for role in roles for name in names}
    return persistent_layouts(specs, made, divided={"w": divided})


def test_weights_of_experts_are_cut_along_two_axes_and_by_zero_along_the_rest():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_expert=2, num_tensor=2)
    made = axis_rule(mesh, stage=3, min_bytes=0)
    dims = {0: Dim.EXPERTS, 2: Dim.CHANNELS}
    layout = layouts_of(made, (8, 24, 32), dims).of(ArrayId(Role.PARAM, "w"))
    assert layout.device.spec == PartitionSpec("expert", "fsdp", "tensor")
    assert layout.computed.spec == PartitionSpec("expert", None, "tensor")
    assert num_data_parallel(mesh) == NUM_SHARDS // 2


def test_experts_are_cut_by_experts_alone_and_their_state_among_the_other_devices():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_expert=4)
    made = axis_rule(mesh, stage=3, min_bytes=0)
    assert made.param_axes == ("fsdp", "expert")
    of_experts = made.dividing([Dim.EXPERTS])
    assert of_experts.param_axes == ("fsdp",)
    assert of_experts.num_shards == 2
    assert num_data_parallel(mesh) == NUM_SHARDS
    names = "w", "dense"
    found = layouts_of(made, (8, 24, 32), {0: Dim.EXPERTS}, names=names)
    for role in (Role.PARAM, Role.MASTER, Role.GRADIENT):
        layout = found.of(ArrayId(role, "w"))
        assert layout.device.spec == PartitionSpec(("expert",), ("fsdp",))
        assert layout.computed.spec == PartitionSpec(("expert",))
        assert layout.share == layout.device
        assert not layout.is_gathered
    dense = found.of(ArrayId(Role.PARAM, "dense"))
    assert dense.device.spec == PartitionSpec(None, ("fsdp", "expert"))
    assert dense.computed.is_fully_replicated
    # Small experts are cut by experts at any stage.
    for stage in (0, 3):
        large = axis_rule(mesh, stage=stage, min_bytes=1 << 20)
        bias = layouts_of(large, (8, 3), {0: Dim.EXPERTS}).of(ArrayId(Role.PARAM, "w"))
        assert bias.is_gathered
        assert bias.device_shape == (2, 3)
