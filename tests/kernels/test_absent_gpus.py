"""Ops compile for GPUs that are not there: to a kernel where there is one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zinf_kernels.absent_gpu import GPUS, compile_for, compile_over
from zinf_kernels.cross_entropy import cases as losses
from zinf_kernels.cross_entropy import cross_entropy
from zinf_kernels.quantize import dequantize, quantize
from zinf_kernels.tiled_matmul import cases as matmuls
from zinf_kernels.tiled_matmul import matmul

pytestmark = pytest.mark.gpu_compiler

SHORT = jnp.bfloat16
TOKENS, DIM, VOCAB = 8192, 512, 32 << 10
# What the docstring of `token_losses` says of its temporary arrays.
PIECE_BYTES = 4 * 2048 * 8192
LOSS_BYTES = 4 * TOKENS * DIM + 4 * DIM * 8192 + 6 * PIECE_BYTES


def shaped(*shape: int, dtype: Any = SHORT) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def there_and_back(x, **options):
    return dequantize(quantize(x, **options))


def programs() -> Iterator[tuple[str, Callable, Any]]:
    """Name, function and arguments of programs that are kernels on Hopper."""
    for bits in (8, 4):
        run = partial(there_and_back, bits=bits, key=jax.random.key(0))
        yield f"quantize {bits}", run, [shaped(1 << 16)]
    for case in matmuls.benchmark_cases(512, 256):
        arrays = [shaped(case.m, case.k), shaped(case.k, case.n)]
        if case.has_bias:
            arrays.append(shaped(case.n))
        if case.residual_dtype:
            arrays.append(shaped(case.m, case.n, dtype=case.residual_dtype))

        def product(a, b, *rest, case=case):
            bias = rest[0] if case.has_bias else None
            residual = rest[-1] if case.residual_dtype else None
            return matmul(a, b, bias=bias, residual=residual, **case.options)

        yield f"matmul {case.name}", product, arrays
    for case in losses.benchmark_cases(TOKENS, DIM, VOCAB):

        def total(x, weight, labels, case=case):
            options = case.options | {"implementation": ("mosaic_gpu", "xla")}
            return cross_entropy(x, weight, labels, **options).total

        sizes = (DIM, VOCAB) if case.vocab_axis else (VOCAB, DIM)
        arrays = [shaped(TOKENS, DIM), shaped(*sizes), shaped(TOKENS, dtype=jnp.int32)]
        yield f"loss {case.name}", jax.value_and_grad(total, (0, 1)), arrays


PROGRAMS = {name: rest for name, *rest in programs()}


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_op_compiles_to_a_kernel_where_there_is_one(gpu, name):
    function, arguments = PROGRAMS[name]
    made = compile_for(GPUS[gpu], function, *arguments)
    assert ("mosaic_gpu" in made.as_text()) == (gpu == "H200")
    if name.startswith("loss"):
        assert made.memory_analysis().temp_size_in_bytes <= LOSS_BYTES


def products(a, b):
    """The kernel forward, and gradients by what each device has and what all have."""

    def total(a, b):
        return jnp.sum(matmul(a, b).astype(jnp.float32))

    grads = jax.grad(total, (0, 1))(a, b)
    return grads[0] + jnp.sum(grads[1]).astype(SHORT) + jnp.sum(matmul(a, b))


def test_in_shard_map_each_gpu_runs_the_kernel_on_its_part():
    specs = [P("device"), P(), P("device")]
    arrays = shaped(512, 64), shaped(64, 128)
    made = compile_over(GPUS["H200"], products, *arrays, specs=specs, num_devices=2)
    text = made.as_text()
    assert "mosaic_gpu" in text
    assert "all-gather" not in text
    # Of the gradient by what all have.
    assert "all-reduce" in text
