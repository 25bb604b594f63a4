"""Floating-point operations are counted by the formulas that everyone uses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from zinf.core.jaxpr import flatten, trace
from zinf.core.segment.flops import equation_flops


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (w @ c, None), x, length=5)[0]


def branched(x, w, p):
    return jax.lax.cond(p, lambda: x, lambda: w @ (w @ x))


def repeated(x, w):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: w @ c, x)


convolved = partial(
    jax.lax.conv_general_dilated,
    window_strides=(1, 1),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
IMAGES, PIXELS = spec(2, 8, 8, 4), 2 * 8 * 8
LAYER, PRODUCT = (spec(4), spec(4, 4)), 2 * 4 * 4
# By name: the function, what it is given, and its formula.
CASES = {
    "a matmul": (jnp.matmul, (spec(3, 4), spec(4, 5)), 2 * 3 * 4 * 5),
    "batch dims once": (jnp.matmul, (spec(7, 3, 4), spec(7, 4, 5)), 7 * 2 * 3 * 4 * 5),
    # 3x3 kernels, 4 features in, 6 out, padded to the same size.
    "a convolution": (
        convolved,
        (IMAGES, spec(3, 3, 4, 6)),
        2 * PIXELS * 6 * 3 * 3 * 4,
    ),
    "in two groups": (
        partial(convolved, feature_group_count=2),
        (IMAGES, spec(3, 3, 2, 6)),
        2 * PIXELS * 6 * 3 * 3 * 2,
    ),
    "one an element": (lambda x: jnp.sin(x) + 1, (spec(3, 4),), 2 * 12),
    "a scan": (scanned, LAYER, 5 * PRODUCT),
    # And a cast of the predicate to the number of a branch.
    "the dearest branch": (branched, (*LAYER, spec(dtype=bool)), 2 * PRODUCT + 1),
    "remat": (jax.checkpoint(lambda x, w: w @ x), LAYER, PRODUCT),
    # Of a while one iteration, and its condition: a slice, a squeeze and a comparison.
    "a while": (repeated, LAYER, PRODUCT + 3),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_are_counted_by_their_formula(name):
    function, specs, wanted = CASES[name]
    equations = flatten(trace(function, *specs)[0]).equations
    assert sum(map(equation_flops, equations)) == wanted
