"""Both forms of an array are the array, on any mesh and at any stage."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.core.memory import (
    DeviceStore,
    Residents,
    in_device_form,
    open_stores,
    to_devices,
    to_shares,
)
from zinf.core.memory.shares import gathered
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import Layout, axis_rule, persistent_layouts
from zinf.core.sharding.mesh import make_mesh

# Few, as each is compiled for.
SHAPES = [(), (0, 3), (5,), (23,), (3, 5), (23, 29), (4, 6, 10), (3, 1, 7), (1100, 2)]
MESHES = [(1, 1), (1, 2), (2, 2), (1, 8), (2, 4), (4, 2)]
PERSISTENT = [ArrayId.persistent(kind, "w") for kind in ("param", "master", "state0")]
PARAM = PERSISTENT[0]
ARRAYS = [*PERSISTENT, ArrayId(Role.GRADIENT, "w")]


@cache
def layout(
    shape: tuple[int, ...],
    array: ArrayId,
    grouping: tuple[int, int],
    stage: int,
    gathers_in_group: bool,
) -> Layout:
    replicas, shards = grouping
    mesh = make_mesh(jax.devices()[: replicas * shards], num_replicas=replicas)
    rule = axis_rule(mesh, stage=stage, min_bytes=0, gathers_in_group=gathers_in_group)
    spec = ArraySpec(shape, "float32", 4)
    return persistent_layouts(dict.fromkeys(PERSISTENT, spec), rule).of(array)


layouts = st.builds(
    layout,
    st.sampled_from(SHAPES),
    st.sampled_from(ARRAYS),
    st.sampled_from(MESHES),
    st.integers(0, 3),
    st.booleans(),
)


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return 1 + np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


@settings(deadline=None, max_examples=60)
@given(layouts, st.data())
def test_an_array_comes_back_from_the_devices(made, data):
    content = numbers(made.shape)
    share = made.take_share(content)
    assert share.shape == made.share_shape
    (moved,) = to_devices([share], [made])
    on_devices = in_device_form(moved, made)
    assert on_devices.shape == made.padded
    assert on_devices.addressable_data(0).shape == made.device_shape
    for form in (moved, on_devices):
        (back,) = to_shares([form], [made])
        np.testing.assert_array_equal(back, share)
        np.testing.assert_array_equal(gathered(back, made), content)
    # Padding is zero, so that norms do not see it.
    whole = np.asarray(on_devices)
    np.testing.assert_array_equal(made.unpadded(whole), content)
    assert whole.sum(dtype=float) == content.sum(dtype=float)
    # A device has its part of a share.
    counts = [np.prod(made.padded, dtype=int), np.prod(made.device_shape, dtype=int)]
    if made.is_gathered:
        assert counts[0] == counts[1]
    else:
        num_shards = counts[0] // counts[1]
        assert num_shards * counts[1] == counts[0]
        assert num_shards in (made.device.num_devices, made.device.mesh.shape["fsdp"])
    # Rows are the rows of the whole.
    if made.has_whole_rows and made.shape[0]:
        start = data.draw(st.integers(0, made.shape[0] - 1))
        stop = data.draw(st.integers(start + 1, made.shape[0]))
        rows = made.piece((start, stop))
        part = share[start:stop]
        np.testing.assert_array_equal(rows.take_share(content[start:stop]), part)
        np.testing.assert_array_equal(gathered(part, rows), content[start:stop])


def test_the_ledger_counts_what_one_device_has():
    made = layout((23, 29), PARAM, (1, 8), 3, False)
    store = DeviceStore(jax.devices()[:8])
    (moved,) = to_devices([made.take_share(numbers(made.shape))], [made])
    store.write(PARAM, moved).result()
    shard_bytes = 4 * 23 * 32 // 8
    assert store.ledger.used_bytes == shard_bytes
    everywhere = layout((23, 29), PARAM, (1, 8), 1, False)
    whole = in_device_form(moved, everywhere)
    store.write(PARAM, whole).result()
    assert store.ledger.used_bytes == 4 * 23 * 32
    store.free(PARAM)
    assert store.ledger.used_bytes == 0


def test_devices_of_a_process_that_are_no_neighbours_are_refused(monkeypatch):
    made = layout((16, 32), PARAM, (1, 8), 3, False)
    blocks = dict(list(made.blocks(made.share).items())[::2])
    monkeypatch.setattr(Layout, "blocks", lambda self, sharding: blocks)
    apart = Layout(made.shape, made.padded, made.device, made.share)
    with pytest.raises(ValueError, match="no neighbours.*zinf.make_mesh"):
        assert apart.box


RESIDENT = {"by rows": (1100, 2), "a vector": (23,), "by columns": (6, 23)}


@pytest.mark.parametrize(
    ("name", "tier", "stage"),
    [
        ("by rows", Tier.DEVICE, 3),
        ("by rows", Tier.HOST, 1),
        ("a vector", Tier.DEVICE, 1),
        ("a vector", Tier.HOST, 3),
        ("by columns", Tier.DEVICE, 3),
        ("by columns", Tier.HOST, 3),
    ],
)
def test_any_rows_are_read_and_written_alike_however_an_array_is_cut(name, tier, stage):
    mesh = make_mesh(jax.devices()[:8])
    array, shape = ArrayId(Role.PARAM, name), RESIDENT[name]
    specs = {array: ArraySpec(shape, "float32", 4)}
    found = persistent_layouts(specs, axis_rule(mesh, stage=stage, min_bytes=0))
    assert found.of(array).has_whole_rows == (name == "by columns")
    budgets = {Tier.DEVICE: 1 << 20, Tier.HOST: 1 << 20}
    stores = open_stores(list(mesh.devices.flat), capacity_bytes=budgets)
    residents = Residents(stores, found, {array: tier})
    expected = np.random.default_rng(0).standard_normal(shape, np.float32)
    edges = [*range(0, shape[0], max(5, shape[0] // 4)), shape[0]]
    for rows in zip(edges, edges[1:], strict=False):
        residents.write_new(array.piece(rows), expected[slice(*rows)])
    np.testing.assert_array_equal(residents.read(array), expected)
    np.testing.assert_array_equal(residents.read(array.piece((2, 5))), expected[2:5])
    residents.write(array, -expected)
    np.testing.assert_array_equal(residents.read(array), -expected)
    stores.close()
