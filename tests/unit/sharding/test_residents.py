"""Any rows of an array are read and written alike, however it is cut."""

import jax
import numpy as np
import pytest

from zinf.memory import Residents, open_stores
from zinf.mesh import make_mesh
from zinf.program import ArrayId, ArraySpec, Role, Tier
from zinf.sharding import axis_rule, persistent_layouts

SHAPES = {"by rows": (1100, 2), "a vector": (23,), "by columns": (6, 23)}
BUDGET_BYTES = 1 << 20


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("stage", [1, 3])
def test_rows_are_those_of_the_whole(name, tier, stage):
    mesh = make_mesh(jax.devices()[:8])
    array, shape = ArrayId(Role.PARAM, name), SHAPES[name]
    specs = {array: ArraySpec(shape, "float32", 4)}
    rule = axis_rule(mesh, stage=stage, min_bytes=0)
    layouts = persistent_layouts(specs, rule)
    assert layouts.of(array).has_whole_rows == (name == "by columns")
    stores = open_stores(
        list(mesh.devices.flat),
        device_bytes=BUDGET_BYTES,
        host_bytes=BUDGET_BYTES,
        nvme_bytes=0,
    )
    residents = Residents(stores, specs, {array: tier}, layouts)
    expected = np.random.default_rng(0).standard_normal(shape, np.float32)
    for start in range(0, shape[0], 5):
        rows = start, min(start + 5, shape[0])
        part = ArrayId(Role.PARAM, name, rows)
        residents.write_new(part, expected[slice(*rows)])
    np.testing.assert_array_equal(residents.read(array), expected)
    some = 2, 5
    np.testing.assert_array_equal(
        residents.read(ArrayId(Role.PARAM, name, some)), expected[slice(*some)]
    )
    residents.write(array, -expected)
    np.testing.assert_array_equal(residents.read(array), -expected)
    stores.close()
