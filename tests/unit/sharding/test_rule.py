"""Which dim of an array is cut, and along which axes."""

from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from zinf.mesh import AXES, make_mesh
from zinf.program import ArrayId, ArraySpec, Role
from zinf.sharding import num_data_parallel, persistent_layouts
from zinf.sharding.rule import LANES, WIDE_BYTES, AxisRule, Dim, axis_rule

NUM_SHARDS = 8
ITEM_BYTES = 4


def rule(**options) -> AxisRule:
    arguments = {"stage": 3, "min_bytes": 0, **options}
    return axis_rule(make_mesh(jax.devices()[:NUM_SHARDS]), **arguments)


def cut_dim(
    *shape: int, has_layers: bool = False, may_pad: bool = True, **options
) -> int | None:
    nbytes = ITEM_BYTES * prod(shape)
    flags = {"has_layers": has_layers, "may_pad": may_pad}
    return rule(**options).cut_dim(shape, nbytes, **flags)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_a_dim_that_is_cut_gives_every_shard_some_of_it(shape, may_pad):
    dim = cut_dim(*shape, may_pad=may_pad)
    if dim is None:
        return
    assert shape[dim] > 1
    assert prod(shape) > NUM_SHARDS
    assert may_pad or shape[dim] % NUM_SHARDS == 0


def test_rows_are_cut_last():
    assert cut_dim(16, 24) == 1
    assert cut_dim(16, 24, 5) == 1
    assert cut_dim(64) == 0
    assert cut_dim(16, 23) == 0
    assert cut_dim(16, 1) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_layers_are_never_cut_however_many_there_are(shape, may_pad):
    assert cut_dim(*shape, has_layers=True, may_pad=may_pad) != 0
    assert cut_dim(1 << 20, *shape, has_layers=True, may_pad=may_pad) != 0
    assert cut_dim(16, 23, has_layers=True) == 1


def test_the_last_dim_is_cut_into_whole_lanes_or_after_others():
    wide = LANES * NUM_SHARDS
    assert cut_dim(3, 16, wide) == 1
    assert cut_dim(3, 5, wide) == 2
    assert cut_dim(3, 16, wide // 2) == 1
    assert cut_dim(3, 5, wide // 2) == 2


def test_of_a_large_array_rows_are_cut_if_that_makes_the_last_dim_narrow():
    narrow = LANES * NUM_SHARDS // 2
    rows = WIDE_BYTES // ITEM_BYTES // narrow
    assert cut_dim(rows, narrow) == 0
    assert cut_dim(rows - NUM_SHARDS, narrow) == 1
    assert cut_dim(rows, narrow, has_layers=True) == 1
    assert cut_dim(rows, 2 * narrow) == 1


def test_the_largest_dim_is_padded():
    assert cut_dim(3, 5, 23) == 2
    assert cut_dim(3, 23, 5) == 1
    assert cut_dim(3, 23, 5, may_pad=False) is None


def test_small_arrays_stay_whole():
    nbytes = ITEM_BYTES * 16 * 16
    assert cut_dim(16, 16, min_bytes=nbytes) == 1
    assert cut_dim(16, 16, min_bytes=nbytes + 1) is None
    assert cut_dim(NUM_SHARDS) is None
    assert cut_dim(NUM_SHARDS + 1) == 0
    assert cut_dim() is None


@pytest.mark.parametrize(
    ("stage", "cut"),
    [
        (0, set()),
        (1, {Role.MASTER}),
        (2, {Role.MASTER, Role.GRADIENT}),
        (3, {Role.MASTER, Role.GRADIENT, Role.PARAM}),
    ],
)
def test_a_stage_says_what_is_cut_on_the_devices(stage, cut):
    made = rule(stage=stage)
    roles = {Role.PARAM, Role.GRADIENT, Role.MASTER}
    assert {role for role in roles if made.device_axes(role)} == cut
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
    )


def test_groups_that_cross_processes_are_refused_where_they_hold_parameters():
    mesh = mesh_of_processes(2, 4, 1, 1, 1)
    with pytest.raises(ValueError, match="4 devices .* some of the processes 0, 1"):
        axis_rule(mesh, stage=3, min_bytes=0, gathers_in_group=True)
    axis_rule(mesh, stage=2, min_bytes=0, gathers_in_group=True)
    axis_rule(mesh, stage=3, min_bytes=0)


def test_a_sequence_over_several_processes_is_refused():
    with pytest.raises(ValueError, match=r"4 devices divide \(mesh.seq\) .* 0, 1"):
        axis_rule(mesh_of_processes(1, 2, 4, 1, 1), stage=0, min_bytes=0)
    axis_rule(mesh_of_processes(1, 4, 2, 1, 1), stage=0, min_bytes=0)


def test_a_weight_over_several_processes_is_refused():
    with pytest.raises(ValueError, match=r"weight that 4 .* \(mesh.tensor\) .* 0, 1"):
        axis_rule(mesh_of_processes(1, 2, 1, 1, 4), stage=0, min_bytes=0)
    axis_rule(mesh_of_processes(1, 4, 1, 1, 2), stage=0, min_bytes=0)


def test_heads_are_not_divided_along_two_axes():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_seq=2, num_tensor=2)
    with pytest.raises(NotImplementedError, match="mesh.seq = 2 .* mesh.tensor = 2"):
        axis_rule(mesh, stage=0, min_bytes=0)


def test_weights_of_experts_are_cut_along_two_axes_and_by_zero_along_the_rest():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_expert=2, num_tensor=2)
    rule = axis_rule(mesh, stage=3, min_bytes=0)
    array = ArrayId(Role.PARAM, "w")
    specs = {array: ArraySpec((8, 24, 32), "float32", ITEM_BYTES)}
    dims = {0: Dim.EXPERTS, 2: Dim.CHANNELS}
    layout = persistent_layouts(specs, rule, divided={"w": dims}).of(array)
    assert layout.device.spec == PartitionSpec("expert", "fsdp", "tensor")
    assert layout.computed.spec == PartitionSpec("expert", None, "tensor")
    assert num_data_parallel(mesh) == NUM_SHARDS // 2


def test_experts_are_cut_by_experts_alone_and_their_state_among_the_other_devices():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_expert=4)
    rule = axis_rule(mesh, stage=3, min_bytes=0)
    assert rule.param_axes == ("fsdp", "expert")
    of_experts = rule.dividing([Dim.EXPERTS])
    assert of_experts.param_axes == ("fsdp",)
    assert of_experts.num_shards == 2
    assert num_data_parallel(mesh) == NUM_SHARDS
    specs = {
        ArrayId(role, name): ArraySpec((8, 24, 32), "float32", ITEM_BYTES)
        for role in (Role.PARAM, Role.MASTER)
        for name in ("experts", "dense")
    }
    found = persistent_layouts(specs, rule, divided={"experts": {0: Dim.EXPERTS}})
    for role in (Role.PARAM, Role.MASTER, Role.GRADIENT):
        layout = found.of(ArrayId(role, "experts"))
        assert layout.device.spec == PartitionSpec(("expert",), ("fsdp",))
        assert layout.computed.spec == PartitionSpec(("expert",))
        assert layout.share == layout.device
        assert not layout.is_gathered
    dense = found.of(ArrayId(Role.PARAM, "dense"))
    assert dense.device.spec == PartitionSpec(None, ("fsdp", "expert"))
    assert dense.computed.is_fully_replicated


def test_small_experts_are_cut_by_experts_at_any_stage():
    mesh = make_mesh(jax.devices()[:NUM_SHARDS], num_expert=4)
    specs = {ArrayId(Role.PARAM, "bias"): ArraySpec((8, 3), "float32", ITEM_BYTES)}
    for stage in range(4):
        rule = axis_rule(mesh, stage=stage, min_bytes=1 << 20)
        layout = persistent_layouts(specs, rule, divided={"bias": {0: Dim.EXPERTS}}).of(
            ArrayId(Role.PARAM, "bias")
        )
        assert layout.is_gathered
        assert layout.device_shape == (2, 3)
