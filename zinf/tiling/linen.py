"""The tiled linear layer as a Flax Linen module, with the numbers of `nn.Dense`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from zinf.tiling.linear import (
    BIAS_INIT,
    KERNEL_INIT,
    Initializer,
    LinearTiles,
    linear,
)
from zinf.tiling.splits import split
from zinf_kernels.dispatch import Implementation


class TiledDense(nn.Module):
    """`nn.Dense` whose "kernel" and "bias" are tuples of tiles, as in `LinearTiles`.

    Under the name and key of an `nn.Dense` it has the same numbers.
    """

    features: int
    in_splits: int = 1
    out_splits: int = 1
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = KERNEL_INIT
    bias_init: Initializer = BIAS_INIT
    implementation: Implementation = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        shape = (x.shape[-1], self.features)

        def kernel_tiles(key: jax.Array) -> Any:
            kernel = self.kernel_init(key, shape, self.param_dtype)
            splits = {"in_splits": self.in_splits, "out_splits": self.out_splits}
            return LinearTiles.split(kernel, **splits).kernel

        def bias_tiles(key: jax.Array) -> Any:
            bias = self.bias_init(key, shape[1:], self.param_dtype)
            return split(bias, self.out_splits)

        kernel = self.param("kernel", kernel_tiles)
        bias = self.param("bias", bias_tiles) if self.use_bias else None
        tiles = LinearTiles(kernel, bias)
        return linear(tiles, x, implementation=self.implementation)
