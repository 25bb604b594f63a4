"""Gradients of the kernels of convolutions in groups, on devices with the same rows."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.sharding import axis_rule
from zinf.core.sharding.axes import rewritten
from zinf.core.sharding.axes.convolution import without_uneven_groups
from zinf.core.sharding.mesh import make_mesh

ROWS, CHANNELS = 4, 6
LINE, IMAGE = (ROWS, CHANNELS, 12), (ROWS, 9, 8, CHANNELS)
# (batch, height, width, channels), and kernels (height, width, 1, channels).
LAST = ("NHWC", "HWIO", "NHWC")
RANDOM = np.random.default_rng(0)


def line(w, x):
    y = lax.conv_general_dilated(x, w, (1,), [(3, 0)], feature_group_count=CHANNELS)
    return jnp.tanh(y)


def image(w, x):
    options = {"rhs_dilation": (2, 1), "dimension_numbers": LAST}
    options["feature_group_count"] = CHANNELS
    return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), [(1, 2), (0, 0)], **options))


def of_pairs(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=3)


def with_strides(w, x):
    return lax.conv_general_dilated(x, w, (2,), "SAME", feature_group_count=CHANNELS)


def transposed(w, x):
    options = {"lhs_dilation": (2,), "feature_group_count": CHANNELS}
    return lax.conv_general_dilated(x, w, (1,), [(1, 1)], **options)


def own_rule(w, x):
    f = jax.custom_jvp(line)
    f.defjvp(lambda x, dx: jax.jvp(line, x, dx))
    return f(w, x)


def repeated(w, x):
    """A scan of checkpoints."""
    step = jax.checkpoint(lambda x, _: (line(w, x), None))
    return lax.scan(step, x, None, length=2)[0]


def loss_of(function):
    return lambda p, batch: jnp.mean(function(p["w"], batch["x"]) ** 2)


# Four devices, of which two have the same rows.
RULES = {
    axis: axis_rule(
        make_mesh(jax.devices()[:4], **{f"num_{axis}": 2}), stage=0, min_bytes=0
    )
    for axis in ("tensor", "seq")
}


@pytest.mark.parametrize("axis", RULES)
@pytest.mark.parametrize(
    ("function", "shape", "kernel", "dtype"),
    [
        (line, LINE, (CHANNELS, 1, 4), "float32"),
        (repeated, LINE, (CHANNELS, 1, 4), "bfloat16"),
        (image, IMAGE, (3, 2, 1, CHANNELS), "float32"),
        (image, IMAGE, (3, 2, 1, CHANNELS), "bfloat16"),
        (of_pairs, LINE, (2 * CHANNELS, 2, 4), "float32"),
        (with_strides, LINE, (CHANNELS, 1, 4), "float32"),
    ],
)
def test_kernels_have_the_gradient_of_one_device(axis, function, shape, kernel, dtype):
    loss = loss_of(function)
    values = (RANDOM.standard_normal(s, np.float32) for s in (kernel, shape))
    w, x = (jnp.asarray(v, dtype) for v in values)
    expected = jax.value_and_grad(loss)({"w": w}, {"x": x})
    by_rows = NamedSharding(RULES[axis].mesh, PartitionSpec("fsdp"))
    divided = rewritten(loss, RULES[axis], is_loss=True)
    found = jax.jit(jax.value_and_grad(divided))(
        {"w": w}, {"x": jax.device_put(x, by_rows)}
    )
    bound = 16 * float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(expected), rtol=bound, atol=bound / 16
    )


@pytest.mark.parametrize("axis", RULES)
@pytest.mark.parametrize("function", [transposed, own_rule])
def test_other_convolutions_in_groups_are_refused(axis, function):
    arguments = {"w": jnp.zeros((CHANNELS, 1, 4))}, {"x": jnp.zeros(LINE)}
    loss = rewritten(loss_of(function), RULES[axis], is_loss=True)
    with pytest.raises(NotImplementedError, match=f"mesh.{axis} .* in groups"):
        jax.eval_shape(loss, *arguments)


@pytest.mark.parametrize("rows", [2, 4])
def test_kernels_are_right_where_a_loss_leaves_fewer_rows_than_devices(rows):
    """Means over groups of eight examples, one on each device."""
    mesh = make_mesh(jax.devices()[:8])
    rule = axis_rule(mesh, stage=0, min_bytes=0)

    def loss(p, batch):
        x = batch["x"].reshape(rows, -1, *LINE[1:]).mean(1)
        return jnp.mean(line(p["w"], x) ** 2)

    normal = partial(RANDOM.standard_normal, dtype=np.float32)
    params, batch = {"w": normal((CHANNELS, 1, 4))}, {"x": normal((8, *LINE[1:]))}
    expected = jax.grad(loss)(params, batch)
    by_rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))
    found = jax.jit(jax.grad(without_uneven_groups(loss, rule)))(params, by_rows)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)
