"""`matmul`: every sum against exact arithmetic, as a kernel and by XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf_kernels.absent_gpu import GPUS, compile_for
from zinf_kernels.interpreter import IS_OLD, LOCKS_UP, interpreted
from zinf_kernels.tiled_matmul import matmul, mosaic_gpu, obstacles
from zinf_kernels.tiled_matmul.cases import Case, benchmark_cases, cases
from zinf_kernels.tiles import Tiles

CASES = tuple(cases())
# Small ones: the interpreter is slow.
TILES = Tiles(m=64, n=64, k=64)
KERNEL_CASES = [c for c in CASES if TILES.obstacle(c.m, c.n, c.k) is None]
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
H200 = GPUS["H200"].device


def wide(x: Any) -> Any:
    return None if x is None else np.asarray(x, np.float64)


def exact(case: Case, arrays: Any) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and what it is a sum of."""
    a, b, bias, residual = map(wide, arrays)
    x, parts = a @ b, abs(a) @ abs(b)
    if bias is not None:
        x, parts = x + bias, parts + abs(bias)
    if residual is not None:
        x, parts = x + residual, parts + abs(residual)
    return x, parts


def assert_exact(made: Any, case: Case, arrays: Any) -> None:
    """k products and two more terms, each rounded in float32, and one last rounding."""
    expected, parts = exact(case, arrays)
    dtype = jnp.dtype(case.out_dtype or case.dtype)
    assert (made.shape, made.dtype) == (expected.shape, dtype)
    bound = 1.01 * (case.k + 2) * 2.0**-24 * parts + UNIT[dtype.name] * abs(expected)
    assert (abs(wide(made) - expected) <= bound).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_within_the_bound_of_exact_arithmetic(case):
    a, b, bias, residual = arrays = case.make()
    made = matmul(a, b, bias=bias, residual=residual, **case.options)
    assert_exact(made, case, arrays)


@pytest.mark.skipif(IS_OLD, reason=LOCKS_UP)
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
def test_gradients_are_those_of_exact_arithmetic(case):
    """Of each product's rounding once before it and once after it, and sums."""
    arrays = case.make()
    dtype = jnp.dtype(case.out_dtype or case.dtype)
    random = np.random.default_rng(9)
    by = jnp.asarray(random.standard_normal((case.m, case.n)), dtype)

    @jax.jit
    def results(arrays, by):
        def run(a, b, bias, residual):
            return matmul(a, b, bias=bias, residual=residual, **case.options)

        return jax.vjp(run, *arrays)[1](by)

    made = results(arrays, by)
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


def test_one_can_ask_why_the_kernel_cannot_run():
    a, b = jnp.ones((256, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    assert obstacles(H200, a=a, b=b, residual=jnp.ones((256, 128))) == {}

    def reason(a, b, device=H200, **options):
        return obstacles(device, a=a, b=b, **options)["mosaic_gpu"]

    assert "m is 255, which is no positive multiple of 256" in reason(a[:255], b)
    assert "n is 0" in reason(a, b[:, :0])
    assert "k is 63" in reason(a[:, :63], b[:63])
    assert "bfloat16 or float16, not float32" in reason(*map(jnp.float32, (a, b)))
    assert "not float16" in reason(a, b, out_dtype=jnp.float16)
    assert "compute capability 9.0" in reason(a, b, GPUS["B200"].device)
    with pytest.raises(ValueError, match="it is for GPUs and this is a CPU"):
        matmul(a, b, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": jnp.ones((4, 5))}, r"a has shape \(2, 3\) and b \(4, 5\)"),
        ({"b": jnp.ones((3, 5), jnp.bfloat16)}, "b bfloat16. Convert both"),
        ({"b": jnp.ones((3, 5), int)}, "b is int32"),
        ({"bias": jnp.ones(4)}, r"bias has shape \(4,\), not \(5,\)"),
        ({"residual": jnp.ones((5, 2))}, r"not \(2, 5\)"),
        ({"out_dtype": int}, "out_dtype is int"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        matmul(**{"a": jnp.ones((2, 3)), "b": jnp.ones((3, 5))} | change)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "case", tuple(benchmark_cases(512, 256)), ids=lambda case: case.name
)
def test_it_compiles_for_every_gpu_to_a_kernel_where_there_is_one(gpu, case):
    given = [
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in case.make()
    ]

    def run(a, b, bias, residual):
        return matmul(a, b, bias=bias, residual=residual, **case.options)

    text = compile_for(GPUS[gpu], partial(run), *given).as_text()
    assert ("mosaic_gpu" in text) == (GPUS[gpu].capability == (9, 0))
