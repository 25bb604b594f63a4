"""Benchmark cases of every op of zinf_kernels, with lower bounds of bytes and flops."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zinf_kernels import cross_entropy, quantize, tiled_matmul
from zinf_kernels.cross_entropy import api as cross_entropy_api
from zinf_kernels.cross_entropy import cases as cross_entropy_cases
from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.device import Device
from zinf_kernels.quantize import api as quantize_api
from zinf_kernels.quantize import cases as quantize_cases
from zinf_kernels.tiled_matmul import api as matmul_api
from zinf_kernels.tiled_matmul import cases as matmul_cases


@dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays: `FULL` for a GPU, `SMALL` to check that everything runs."""

    numel: int
    tokens: int
    dim: int
    vocab: int


FULL = Sizes(numel=1 << 28, tokens=16 << 10, dim=4096, vocab=128 << 10)
SMALL = Sizes(numel=1 << 13, tokens=16, dim=32, vocab=64)


@dataclass(frozen=True)
class Problem:
    """One op on one case.

    Attributes:
        run: takes the name of an implementation; returns the function to compile.
        specs: shapes and dtypes of the arguments of that function, in pytrees.
        existing: names of the implementations; the last has no kernel, only XLA.
        obstacles: reasons why implementations cannot run on a device, by name.
        floor_bytes: bytes of device memory that must be read or written.
        floor_flops: flops of matrix products; additions and multiplications count one
            each.
        num_labels: integer arguments are smaller than this.
    """

    op: str
    case: str
    run: Callable[[str | None], Callable[..., Any]]
    specs: tuple[Any, ...]
    existing: tuple[str, ...]
    obstacles: Callable[[Device], dict[str, str]]
    floor_bytes: int
    floor_flops: int = 0
    num_labels: int = 128

    @property
    def name(self) -> str:
        return f"{self.op} {self.case}"

    def chosen(self, device: Device) -> str:
        """The implementation that runs on this device by default."""
        found = self.obstacles(device)
        return next(name for name in self.existing if name not in found)

    def worth_compiling(self, device: Device) -> list[str]:
        """The default implementation, and the other kernels that can run there."""
        found = self.obstacles(device)
        others = [name for name in self.existing[:-1] if name not in found]
        return list(dict.fromkeys((self.chosen(device), *others)))

    def make(self) -> tuple[Any, ...]:
        """Random arguments on the default device; no element is negative."""
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def made(spec: Any) -> jax.Array:
            if jnp.issubdtype(spec.dtype, jnp.integer):
                most = min(self.num_labels, 127)
                return jax.random.randint(next(keys), spec.shape, 0, most, spec.dtype)
            return abs(jax.random.normal(next(keys), spec.shape, spec.dtype)) / 64

        return jax.tree.map(made, self.specs)


def problems(sizes: Sizes) -> Iterator[Problem]:
    """All problems, ordered by op."""
    for case in quantize_cases.benchmark_cases(sizes.numel):
        yield from quantize_problems(case)
    widths = sizes.tokens, sizes.dim, sizes.vocab
    for case in cross_entropy_cases.benchmark_cases(*widths):
        yield cross_entropy_problem(case)
    for case in matmul_cases.benchmark_cases(sizes.tokens, sizes.dim):
        yield matmul_problem(case)


def quantize_problems(case: quantize_cases.Case) -> Iterator[Problem]:
    """Quantize, and dequantize, which is the same for both kinds of rounding."""
    numel = case.shape[0]
    wide = jnp.dtype(case.dtype).itemsize * numel
    short = numel * case.bits // 8 + 4 * numel // case.block_size
    x = jax.ShapeDtypeStruct(case.shape, case.dtype)
    common = {
        "existing": quantize_api.EXISTING,
        "obstacles": partial(quantize.obstacles, x=x, block_size=case.block_size),
        "floor_bytes": wide + short,
    }

    def there(implementation: str | None, x: Any) -> Any:
        options = case.options | {"implementation": implementation}
        return quantize.quantize(x, key=case.key(), **options)

    def back(implementation: str | None, quantized: Any) -> Any:
        return quantize.dequantize(quantized, implementation=implementation)

    yield Problem("quantize", case.name, partial(partial, there), (x,), **common)
    if not case.is_stochastic:
        yield Problem(
            "dequantize",
            case.name,
            partial(partial, back),
            (jax.eval_shape(partial(there, "reference"), x),),
            **common,
        )


def cross_entropy_problem(case: cross_entropy_cases.Case) -> Problem:
    """Cross-entropy: its value, and the gradients of both matrices."""
    (tokens,) = case.batch

    def mean(implementation: str | None, x: Any, weight: Any, labels: Any) -> Any:
        options = case.options | {"implementation": implementation}
        return cross_entropy.cross_entropy(x, weight, labels, **options).mean

    x = jax.ShapeDtypeStruct((tokens, case.dim), case.dtype)
    shape = (case.dim, case.vocab)[:: 1 if case.vocab_axis else -1]
    weight = jax.ShapeDtypeStruct(shape, case.dtype)
    chunks = Chunks(case.chunk_tokens, case.chunk_vocab, case.vocab_axis)
    products = case.dim * case.vocab * tokens
    numbers = 2 * (tokens * case.dim + case.dim * case.vocab)
    return Problem(
        "cross_entropy",
        case.name,
        lambda name: jax.value_and_grad(partial(mean, name), (0, 1)),
        (x, weight, jax.ShapeDtypeStruct((tokens,), jnp.int32)),
        cross_entropy_api.EXISTING,
        partial(cross_entropy.obstacles, x=x, weight=weight, chunks=chunks),
        jnp.dtype(case.dtype).itemsize * numbers,
        # Three matrix products: one for the value, one for each of the two gradients;
        # each multiplication comes with an addition.
        3 * 2 * products,
        case.vocab,
    )


def matmul_problem(case: matmul_cases.Case) -> Problem:
    """A matrix product with its epilogue."""
    m, n, k = case.m, case.n, case.k
    a, b = (jax.ShapeDtypeStruct(s, case.dtype) for s in ((m, k), (k, n)))
    bias = jax.ShapeDtypeStruct((n,), case.dtype) if case.has_bias else None
    residual = None
    if case.residual_dtype is not None:
        residual = jax.ShapeDtypeStruct((m, n), case.residual_dtype)

    def multiply(
        implementation: str | None, a: Any, b: Any, bias: Any, residual: Any
    ) -> Any:
        options = case.options | {"implementation": implementation}
        return tiled_matmul.matmul(a, b, bias=bias, residual=residual, **options)

    out = jax.ShapeDtypeStruct((m, n), case.out_dtype or case.dtype)
    moved = [x for x in (a, b, bias, residual, out) if x is not None]
    return Problem(
        "matmul",
        case.name,
        partial(partial, multiply),
        (a, b, bias, residual),
        matmul_api.EXISTING,
        partial(
            tiled_matmul.obstacles, a=a, b=b, residual=residual, out_dtype=out.dtype
        ),
        sum(x.size * jnp.dtype(x.dtype).itemsize for x in moved),
        2 * m * n * k,
    )
