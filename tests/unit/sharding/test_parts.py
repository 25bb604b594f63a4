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
PLAIN = Nibbles()
LOCO = Nibbles(err_beta=0.8)
SHAPES = ((5, 160), (3, 16, 1024), (64, 30), (2, 1, 133))


def parts_of(
    shape: tuple[int, ...], num_nodes: int, encoding: Nibbles = PLAIN
) -> Parts:
    mesh = make_mesh(jax.devices()[:DEVICES], num_replicas=num_nodes)
    rule = axis_rule(
        mesh,
        stage=3,
        min_bytes=0,
        gathers_in_group=num_nodes > 1,
        gradient_encoding=encoding,
    )
    specs = {ArrayId(Role.PARAM, "w"): ArraySpec(shape, "float32", 4)}
    return persistent_layouts(specs, rule).parts["w"]


def exchanged(parts: Parts, content: np.ndarray) -> np.ndarray:
    """By the devices, from the parts (devices, ...)."""
    given = jax.device_put(np.moveaxis(content, 0, 1), parts.layout.device)
    total, *_ = jax.jit(lambda x: parts.exchange(x, (), jnp.float32))(given)
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
    parts = parts_of((6, 16, 64), 2, LOCO)
    content = np.random.default_rng(1).standard_normal((DEVICES, 6, 16, 64), np.float32)
    whole, errors = steps(parts, [content])
    for rows in ((0, 1), (2, 5)):
        piece, own = steps(parts.piece(rows), [content[:, slice(*rows)]])
        np.testing.assert_array_equal(piece[0], whole[0][slice(*rows)])
        for found, error in zip(own, errors, strict=True):
            np.testing.assert_array_equal(found, error[slice(*rows)])


def steps(
    parts: Parts, contents: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The gradients of steps with error feedback, and the last errors."""
    errors = [
        jax.device_put(jnp.zeros(x.shape, jnp.bfloat16), x.device) for x in parts.errors
    ]
    run = jax.jit(lambda x, e: parts.exchange(x, e, jnp.float32))
    found = []
    for content in contents:
        given = jax.device_put(np.moveaxis(content, 0, 1), parts.layout.device)
        total, errors, _ = run(given, errors)
        found.append(np.asarray(total))
    return found, [np.asarray(x, np.float32) for x in errors]


def fed_back(rows: np.ndarray, errors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Rows after 4-bit blocks, with the error of earlier ones; it is replaced."""
    before = errors.get(name, np.zeros_like(rows))
    sent = rows + before
    values, _ = rounded(sent)
    decay, rest = np.float32(LOCO.err_beta), np.float32(1 - LOCO.err_beta)
    new = decay * before + rest * (sent - values)
    errors[name] = new.astype(ml_dtypes.bfloat16).astype(np.float32)
    return values


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_an_exchange_loses_is_fed_back(num_nodes):
    """LoCo, as DeepSpeed's `loco_swizzle_quant` and `loco_quantized_reduction`."""
    parts = parts_of((5, 160), num_nodes, LOCO)
    random = np.random.default_rng(2)
    contents = [random.standard_normal((DEVICES, 5, 160), np.float32) for _ in range(4)]
    found, _ = steps(parts, contents)
    errors: dict[str, np.ndarray] = {}
    for content, total in zip(contents, found, strict=True):
        expected = []
        for number, mine in enumerate(np.split(content, DEVICES, axis=2)):
            nodes = np.split(mine, num_nodes)
            nodes = [
                reduce(add, fed_back(node, errors, f"{number} in {i}"))
                for i, node in enumerate(nodes)
            ]
            if num_nodes > 1:
                rows = np.stack(nodes).reshape(num_nodes, *mine.shape[1:])
                nodes = list(fed_back(rows, errors, f"{number} between"))
            expected.append(reduce(add, nodes))
        # A sum of two products is rounded once or twice, and then to bfloat16.
        np.testing.assert_allclose(total, np.concatenate(expected, 1), atol=0.4)
        near = np.isclose(total, np.concatenate(expected, 1), rtol=1e-5, atol=1e-5)
        assert near.mean() > 0.97


def test_errors_of_the_same_gradient_cancel_over_steps():
    content = np.random.default_rng(3).standard_normal((DEVICES, 4, 160), np.float32)
    count, whole = 16, content.sum(0)
    without, _ = np.mean([exchanged(parts_of((4, 160), 2), content)], 0), None
    fed, _ = steps(parts_of((4, 160), 2, Nibbles(err_beta=0.0)), [content] * count)
    lost = [np.abs(x - whole).mean() for x in (without, np.mean(fed, 0))]
    assert lost[1] < 4 / count * lost[0]


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
        axis_rule(mesh, stage=3, min_bytes=0, gradient_encoding=PLAIN)
