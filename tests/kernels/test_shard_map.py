"""Kernels are chosen, and compile, in `jax.shard_map` over several GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zinf_kernels.absent_gpu import GPUS, compile_over
from zinf_kernels.cross_entropy import token_losses
from zinf_kernels.quantize import dequantize, quantize
from zinf_kernels.tiled_matmul import matmul

CUT, WHOLE = P("device"), P()
SHORT = jnp.bfloat16


def there_and_back(x):
    return dequantize(quantize(x))


def losses(x, weight, labels):
    """The kernel for the forward and for the backward pass, with a weight on all."""

    def total(x, weight):
        given = x, weight, labels
        return jnp.sum(token_losses(*given, implementation="mosaic_gpu")[0])

    grads = jax.grad(total, (0, 1))(x, weight)
    # What all have the same of is returned as a part for each.
    return grads[0] + jnp.sum(grads[1]).astype(SHORT)


def products(a, b):
    """The kernel forward, and gradients by what each device has and what all have."""

    def total(a, b):
        return jnp.sum(matmul(a, b).astype(jnp.float32))

    grads = jax.grad(total, (0, 1))(a, b)
    return grads[0] + jnp.sum(grads[1]).astype(SHORT) + jnp.sum(matmul(a, b))


OPS = {
    "quantize": (there_and_back, [((1 << 15,), jnp.float32, CUT)]),
    "matmul": (products, [((512, 64), SHORT, CUT), ((64, 128), SHORT, WHOLE)]),
    "cross_entropy": (
        losses,
        [((512, 64), SHORT, CUT), ((64, 256), SHORT, WHOLE), ((512,), jnp.int32, CUT)],
    ),
}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(("function", "arguments"), OPS.values(), ids=OPS)
def test_each_gpu_runs_the_kernel_on_its_part(function, arguments):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in arguments]
    specs = [*(spec for *_, spec in arguments), CUT]
    compiled = compile_over(GPUS["H200"], function, *shapes, specs=specs, num_devices=2)
    text = compiled.as_text()
    assert "mosaic_gpu" in text
    assert "all-gather" not in text
    # Of the gradient by what all have.
    assert ("all-reduce" in text) == (function in (losses, products))
