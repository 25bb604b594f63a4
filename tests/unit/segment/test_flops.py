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


def test_a_matmul_counts_two_for_each_of_its_products():
    assert flops(jnp.matmul, spec(3, 4), spec(4, 5)) == 2 * 3 * 4 * 5


def test_batch_dims_of_a_contraction_are_counted_once():
    einsum = lambda a, b: jnp.einsum("bij,bjk->bik", a, b)  # noqa: E731
    assert flops(einsum, spec(7, 3, 4), spec(7, 4, 5)) == 7 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_two_for_each_tap_of_each_output(groups):
    # 8x8 images, 3x3 kernel, 4 features in, 6 out, padded to the same size.
    kernel = spec(3, 3, 4 // groups, 6)

    def convolve(x, k):
        return jax.lax.conv_general_dilated(
            x,
            k,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    wanted = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4 // groups)
    assert flops(convolve, spec(2, 8, 8, 4), kernel) == wanted


def test_anything_else_counts_one_an_element():
    assert flops(lambda x: jnp.sin(x) + 1, spec(3, 4)) == 2 * 12


def test_a_scan_counts_its_body_once_an_iteration():
    def function(x, w):
        return jax.lax.scan(lambda c, _: (w @ c, None), x, length=5)[0]

    assert flops(function, spec(4), spec(4, 4)) == 5 * 2 * 4 * 4


def test_a_cond_counts_its_dearest_branch():
    def function(x, w):
        return jax.lax.cond(True, lambda: x, lambda: w @ (w @ x))

    def predicate(x, w, p):
        return jax.lax.cond(p, lambda: x, lambda: w @ (w @ x))

    p = jax.ShapeDtypeStruct((), bool)
    found = flops(predicate, spec(4), spec(4, 4), p)
    cast = 1  # of the predicate to a branch number
    assert found == 2 * 2 * 4 * 4 + cast
    assert flops(function, spec(4), spec(4, 4)) <= found


def test_a_while_counts_one_iteration_and_its_condition():
    def function(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: w @ c, x)

    found = flops(function, spec(4), spec(4, 4))
    assert 2 * 4 * 4 <= found <= 2 * 4 * 4 + 10


def test_remat_counts_what_it_holds():
    function = jax.checkpoint(lambda x, w: w @ x)
    assert flops(function, spec(4), spec(4, 4)) == 2 * 4 * 4
