"""The backward pass of `matmul`, by XLA's products."""

import jax
from jaxtyping import Array

from zinf_kernels.pieces import product
from zinf_kernels.tiled_matmul.epilogue import Epilogue


def gradients(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    by_result: Array,
    *,
    epilogue: Epilogue,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Cotangents of `a`, `b`, `bias` and `residual`.

    The product is only computed again if the epilogue's slope depends on it.
    """

    def finished(made: Array, bias: Array | None, residual: Array | None) -> Array:
        line = None if bias is None else bias[None, :]
        return epilogue(made, line, residual)

    _, pull = jax.vjp(finished, product(a, b, (1, 0)), bias, residual)
    by_product, by_bias, by_residual = pull(by_result)
    # In the dtype of the factors, as matrix units want it. A product of float32 with
    # bfloat16, which is what jax makes of this, would be one of float32.
    slope = by_product.astype(a.dtype)
    by_a = product(slope, b, (1, 1)).astype(a.dtype)
    by_b = product(a, slope, (0, 0)).astype(b.dtype)
    return by_a, by_b, by_bias, by_residual
