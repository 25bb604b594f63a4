"""Floating-point operations are counted by the formulas that everyone uses."""

import jax
import jax.numpy as jnp
import pytest

from zinf.jaxpr import flatten, trace
from zinf.segment.flops import equation_flops


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(function, *specs):
    return sum(map(equation_flops, flatten(trace(function, *specs)[0]).equations))


def batched(a, b):
    return jnp.einsum("bij,bjk->bik", a, b)


def convolved(groups):
    def convolve(x, k):
        return jax.lax.conv_general_dilated(
            x,
            k,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    return convolve


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (w @ c, None), x, length=5)[0]


def branched(x, w, p):
    return jax.lax.cond(p, lambda: x, lambda: w @ (w @ x))


def repeated(x, w):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: w @ c, x)


IMAGES, VECTOR, MATRIX = spec(2, 8, 8, 4), spec(4), spec(4, 4)
PRODUCT = 2 * 4 * 4
# By name: the function, what it is given, and its formula.
CASES = {
    "a matmul": (jnp.matmul, (spec(3, 4), spec(4, 5)), 2 * 3 * 4 * 5),
    "batch dims once": (batched, (spec(7, 3, 4), spec(7, 4, 5)), 7 * 2 * 3 * 4 * 5),
    # 3x3 kernels, 4 features in, 6 out, padded to the same size.
    "a convolution": (
        convolved(1),
        (IMAGES, spec(3, 3, 4, 6)),
        2 * (2 * 8 * 8 * 6) * (3 * 3 * 4),
    ),
    "in two groups": (
        convolved(2),
        (IMAGES, spec(3, 3, 2, 6)),
        2 * (2 * 8 * 8 * 6) * (3 * 3 * 2),
    ),
    "one an element": (lambda x: jnp.sin(x) + 1, (spec(3, 4),), 2 * 12),
    "a scan": (scanned, (VECTOR, MATRIX), 5 * PRODUCT),
    # And a cast of the predicate to the number of a branch.
    "the dearest branch": (
        branched,
        (VECTOR, MATRIX, jax.ShapeDtypeStruct((), bool)),
        2 * PRODUCT + 1,
    ),
    "remat": (jax.checkpoint(lambda x, w: w @ x), (VECTOR, MATRIX), PRODUCT),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_are_counted_by_their_formula(name):
    function, specs, wanted = CASES[name]
    assert flops(function, *specs) == wanted


def test_a_while_counts_one_iteration_and_its_condition():
    assert PRODUCT <= flops(repeated, VECTOR, MATRIX) <= PRODUCT + 10
