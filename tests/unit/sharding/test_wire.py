"""Parameters that groups of devices hold (hpZ), with updates sent as integers (qwZ)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zinf.core.memory import in_device_form, to_devices, to_shares
from zinf.core.memory.shares import to_part_of_share
from zinf.core.program import ArrayId, ArraySpec, Role
from zinf.core.sharding import Blocks, Layout, axis_rule, gather, persistent_layouts
from zinf.core.sharding.mesh import make_mesh

DEVICES, PARAM = 8, ArrayId(Role.PARAM, "w")
# Cut along dims 1, 2, 0 and 0, and one with padding.
SHAPES = ((5, 160), (3, 16, 1024), (64, 30), (1000,), (2, 1, 1100))


def layout_of(shape: tuple[int, ...], num_groups: int, dtype: str) -> Layout:
    mesh = make_mesh(jax.devices()[:DEVICES], num_replicas=num_groups)
    on = {"stage": 3, "min_bytes": 0, "encoding": Blocks()}
    rule = axis_rule(mesh, gathers_in_group=num_groups > 1, **on)
    spec = ArraySpec(shape, dtype, jnp.dtype(dtype).itemsize)
    specs = {PARAM: spec}
    if dtype != "float32":
        specs[ArrayId(Role.MASTER, "w")] = ArraySpec(shape, "float32", 4)
    return persistent_layouts(specs, rule).of(PARAM)


def rounded(part: np.ndarray) -> np.ndarray:
    """One device's part after 8-bit blocks of up to 256, within rows of dim 0."""
    rows = part.reshape(part.shape[0] if part.ndim > 1 else 1, -1).astype(np.float32)
    num_blocks = -(-rows.shape[1] // 256)
    width = -(-rows.shape[1] // num_blocks)
    width += width % 2
    filled = np.pad(rows, [(0, 0), (0, num_blocks * width - rows.shape[1])])
    blocks = filled.reshape(len(rows), num_blocks, width)
    scales = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / 127)
    inverse = np.float32(1) / np.where(scales == 0, np.float32(1), scales)
    values = np.rint(blocks * inverse) * scales
    return values.reshape(len(rows), -1)[:, : rows.shape[1]].reshape(part.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_device_has_its_own_part_and_those_of_all_groups_rounded_once(
    shape, num_groups, dtype
):
    made = layout_of(shape, num_groups, dtype)
    assert made.num_groups == num_groups
    numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
    share = made.take_share(
        numbers.astype(ml_dtypes.bfloat16 if dtype[0] == "b" else dtype)
    )
    device_form = in_device_form(to_devices([share], [made])[0], made)
    (dim,) = [d for d, entry in enumerate(made.share.spec) if entry]
    parts = np.split(share, DEVICES, axis=dim)
    wholes = [rounded(part).astype(share.dtype) for part in parts]
    size = DEVICES // num_groups
    for number, device in enumerate(made.device.mesh.devices.flat):
        expected = wholes[number % size :: size]
        expected[number // size] = parts[number]
        (held,) = [x.data for x in device_form.addressable_shards if x.device == device]
        np.testing.assert_array_equal(held, np.concatenate(expected, axis=dim))
    # A share is what its devices keep, not rounded.
    np.testing.assert_array_equal(to_shares([device_form], [made])[0], share)
    box = tuple((n // 3, n) for n in share.shape)
    inside = tuple(slice(*span) for span in box)
    part = to_part_of_share(device_form, made, box)
    np.testing.assert_array_equal(part, share[inside])
    # All devices compute with the same weights, those of one group of all devices.
    expected = made.unpadded(np.concatenate(wholes, axis=dim))
    alone = layout_of(shape, 1, dtype)
    form = in_device_form(to_devices([share], [alone])[0], alone)
    for array, its in ((device_form, made), (form, alone)):
        found = jax.jit(lambda x, its=its: gather(x, its))(array)
        for one in found.addressable_shards:
            np.testing.assert_array_equal(one.data, expected)


def test_without_a_master_in_more_bits_groups_hold_blocks_as_they_are():
    assert layout_of((5, 160), 2, "float32").num_groups == 1
