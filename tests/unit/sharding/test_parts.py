"""Parts of gradients are exchanged as section 3.3 of ZeRO++ says (arXiv:2306.10209)."""

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zinf.core.program import ArrayId, ArraySpec, Role
from zinf.core.sharding import Nibbles, Parts, axis_rule, persistent_layouts
from zinf.core.sharding.mesh import make_mesh

DEVICES = 8
# Cut along dim 1, 2 and 0, and one with padding.
SHAPES = ((5, 160), (3, 16, 1024), (64, 30), (2, 1, 133))


def parts_of(shape: tuple[int, ...], num_nodes: int) -> Parts:
    mesh = make_mesh(jax.devices()[:DEVICES], num_replicas=num_nodes)
    rule = axis_rule(
        mesh,
        stage=3,
        min_bytes=0,
        gathers_in_group=num_nodes > 1,
        gradient_encoding=Nibbles(),
    )
    specs = {ArrayId(Role.PARAM, "w"): ArraySpec(shape, "float32", 4)}
    return persistent_layouts(specs, rule).parts["w"]


def exchanged(parts: Parts, content: np.ndarray) -> np.ndarray:
    """By the devices, from the parts (devices, ...)."""
    given = jax.device_put(np.moveaxis(content, 0, 1), parts.layout.device)
    total = jax.jit(lambda x: parts.exchange(x, jnp.float32))(given)
    assert total.sharding.is_equivalent_to(parts.total.device, total.ndim)
    return np.asarray(total)


# The paper in NumPy, written without a look at `Parts`.


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (..., n) after 4-bit blocks of up to 256, and the scale of each number."""
    size = rows.shape[-1]
    num_blocks = -(-size // 256)
    width = -(-size // num_blocks)
    width += width % 2
    filling = [(0, 0)] * (rows.ndim - 1) + [(0, num_blocks * width - size)]
    blocks = np.pad(rows, filling).reshape(*rows.shape[:-1], num_blocks, width)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = largest * np.float32(1 / 7)
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    scale = np.broadcast_to(scale, blocks.shape)
    inverse = np.float32(1) / np.where(scale == 0, np.float32(1), scale)
    values = np.rint(blocks * inverse) * scale
    assert np.all(np.abs(values - blocks) <= (1 / 2 + 2.0**-19) * scale)

    def as_rows(x: np.ndarray) -> np.ndarray:
        return x.reshape(*rows.shape[:-1], -1)[..., :size]

    return as_rows(values), as_rows(scale)


def emulated(
    content: np.ndarray, num_nodes: int, dim: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The sum that devices get, and a bound on its error.

    Args:
        content: the part of each device, (devices, ...).
        dim: the dim along which the gradient is cut, with `size` after padding.
    """
    filling = [(0, 0)] * content.ndim
    filling[1 + dim] = (0, size - content.shape[1 + dim])
    content = np.pad(content, filling)
    found, bounds = [], []
    for mine in np.split(content, DEVICES, axis=1 + dim):
        flat = mine.reshape(DEVICES, mine.shape[1], -1)
        nodes, bound = [], np.zeros_like(flat[0])
        for node in np.split(flat, num_nodes):
            values, scales = rounded(node)
            nodes.append(reduce(add, values))
            bound += scales.sum(0) / 2
        if num_nodes > 1:
            values, scales = rounded(np.stack(nodes))
            bound += scales.sum(0) / 2
            nodes = list(values)
        found.append(reduce(add, nodes).reshape(mine.shape[1:]))
        bounds.append(bound.reshape(mine.shape[1:]))
    return np.concatenate(found, axis=dim), np.concatenate(bounds, axis=dim)


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_devices_compute_what_the_paper_says_within_its_bound(shape, num_nodes):
    parts = parts_of(shape, num_nodes)
    assert parts.node_size == DEVICES // num_nodes
    random = np.random.default_rng(0)
    content = random.standard_normal((DEVICES, *shape), np.float32)
    content[:, 0] = 0  # Blocks of zeros.
    found = exchanged(parts, content)
    (dim,) = [d for d, n in enumerate(parts.total.device_shape) if n < found.shape[d]]
    expected, bound = emulated(content, num_nodes, dim, found.shape[dim])
    np.testing.assert_array_equal(found, expected)
    error = np.abs(parts.total.unpadded(found) - content.sum(0))
    # The sum of eight in float32 rounds too.
    assert np.all(error <= parts.total.unpadded(bound) + 1e-5)


def test_a_part_that_is_not_finite_makes_its_block_so():
    parts = parts_of((4, 160), 2)
    for value in (np.nan, np.inf):
        content = np.ones((DEVICES, 4, 160), np.float32)
        content[3, 1, 2] = value
        found = exchanged(parts, content)
        assert not np.isfinite(found[1, :20]).any()
        assert np.isfinite(found[0]).all()


def test_rows_are_exchanged_as_in_the_whole():
    parts = parts_of((6, 16, 64), 2)
    content = np.random.default_rng(1).standard_normal((DEVICES, 6, 16, 64), np.float32)
    whole = exchanged(parts, content)
    for rows in ((0, 1), (2, 5)):
        piece = exchanged(parts.piece(rows), content[:, slice(*rows)])
        np.testing.assert_array_equal(piece, whole[slice(*rows)])


@pytest.mark.parametrize(
    ("shape", "why"), [((4096,), "one dim"), ((64, 64), "rows of 8"), ((2, 2), "tiny")]
)
def test_gradients_that_would_save_little_have_no_parts(shape, why):
    with pytest.raises(KeyError):
        parts_of(shape, 1)


@pytest.mark.parametrize(
    ("more", "name"),
    [({"num_replicas": 2}, "replica"), ({"num_tensor": 2}, "tensor")],
)
def test_devices_that_share_examples_or_state_are_refused(more, name):
    mesh = make_mesh(jax.devices()[:DEVICES], **more)
    with pytest.raises(NotImplementedError, match=f"mesh.{name} = 2"):
        axis_rule(mesh, stage=3, min_bytes=0, gradient_encoding=Nibbles())
