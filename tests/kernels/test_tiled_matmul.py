"""`matmul`: every sum against exact arithmetic, as a kernel and by XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.refusals import refusals
from zinf_kernels.interpreter import IS_OLD, LOCKS_UP, interpreted
from zinf_kernels.tiled_matmul import matmul, mosaic_gpu
from zinf_kernels.tiled_matmul.cases import Case, cases
from zinf_kernels.tiles import Tiles

CASES = tuple(cases())
# Small ones: the interpreter is slow.
TILES = Tiles(m=64, n=64, k=64)
KERNEL_CASES = [c for c in CASES if TILES.obstacle(c.m, c.n, c.k) is None]
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def wide(x: Any) -> Any:
    return None if x is None else np.asarray(x, np.float64)


def exact(arrays: Any) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and what it is a sum of."""
    a, b, *added = map(wide, arrays)
    terms = [x for x in added if x is not None]
    return a @ b + sum(terms), abs(a) @ abs(b) + sum(map(abs, terms))


def assert_exact(made: Any, case: Case, arrays: Any) -> None:
    """k products and two more terms, each rounded in float32, and one last rounding."""
    expected, parts = exact(arrays)
    dtype = jnp.dtype(case.out_dtype or case.dtype)
    assert (made.shape, made.dtype) == (expected.shape, dtype)
    bound = 1.01 * (case.k + 2) * 2.0**-24 * parts + UNIT[dtype.name] * abs(expected)
    assert (abs(wide(made) - expected) <= bound).all()


@pytest.mark.skipif(IS_OLD, reason=LOCKS_UP)
@pytest.mark.slow
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_the_kernel_is_within_the_bound_of_exact_arithmetic(case):
    arrays = case.make()
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    a, b, bias, residual = arrays
    bias = None if bias is None else bias.astype(jnp.float32)
    # On two blocks of threads, which have up to three tiles each.
    with interpreted():
        made = mosaic_gpu.matmul(
            a, b, bias, residual, out_dtype=out_dtype, num_cores=2, tiles=TILES
        )
    assert_exact(made, case, arrays)


def test_the_kernel_is_tried_with_every_sum_and_on_several_tiles():
    assert {case.has_bias for case in KERNEL_CASES} == {False, True}
    assert {case.residual_dtype for case in KERNEL_CASES} >= {None, "f4", jnp.bfloat16}
    tiles = [c.m // (2 * TILES.m) * (c.n // TILES.n) for c in KERNEL_CASES]
    assert max(tiles) > 2 * 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_and_gradients_are_those_of_exact_arithmetic(case):
    """The product within its bound, and the gradients.

    Those round each product once before and once after, and sums.
    """
    arrays = case.make()
    dtype = jnp.dtype(case.out_dtype or case.dtype)
    random = np.random.default_rng(9)
    by = jnp.asarray(random.standard_normal((case.m, case.n)), dtype)

    @jax.jit
    def results(arrays, by):
        def run(a, b, bias, residual):
            return matmul(a, b, bias=bias, residual=residual, **case.options)

        value, pull = jax.vjp(run, *arrays)
        return value, pull(by)

    value, made = results(arrays, by)
    assert_exact(value, case, arrays)
    a, b, bias, residual = map(wide, arrays)
    by_z = wide(by)
    exact_ = by_z @ b.T, a.T @ by_z, by_z.sum(axis=0), by_z
    size = abs(by_z)
    sizes = size @ abs(b).T, abs(a).T @ size, size.sum(axis=0), size
    unit = UNIT[jnp.dtype(case.dtype).name]
    sums = (case.m + case.n) * 2.0**-24
    for grad, x, expected, parts in zip(made, arrays, exact_, sizes, strict=True):
        if x is None:
            assert grad is None
            continue
        assert grad.dtype == x.dtype
        last = UNIT[jnp.dtype(x.dtype).name]
        bound = (1.01 * (unit + last) + sums) * parts
        assert (abs(wide(grad) - expected) <= bound).all()


def test_no_product_of_the_backward_pass_is_wider_than_the_factors():
    """A product of float32 with bfloat16 would be one of float32 on a GPU."""
    given = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)

    def total(a, b):
        return jnp.sum(matmul(a, b, out_dtype=jnp.float32))

    equations = jax.make_jaxpr(jax.grad(total, (0, 1)))(*given).jaxpr.eqns
    products = [e.invars for e in equations if e.primitive.name == "dot_general"]
    # One for each factor; the product itself is not computed again.
    assert len(products) == 2
    assert {x.aval.dtype for pair in products for x in pair} == {jnp.dtype("bfloat16")}


WRONG = [
    ("b", jnp.ones((4, 5))),
    ("b", jnp.ones((3, 5), jnp.bfloat16)),
    ("b", jnp.ones((3, 5), int)),
    ("bias", jnp.ones(4)),
    ("residual", jnp.ones((5, 2))),
    ("out_dtype", int),
    ("implementation", "mosaic_gpu"),
]


def test_what_does_not_fit_is_refused(golden):
    good = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 5))}
    calls = {
        f"{n}. {name}": partial(matmul, **good | {name: value})
        for n, (name, value) in enumerate(WRONG)
    }
    golden.check("matmul.txt", refusals(calls))
