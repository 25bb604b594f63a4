"""A linear layer in tiles; each tile is a parameter of its own, streamed alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf.tiling.matmul import affine
from zinf.tiling.splits import cut, join, shared, split
from zinf_kernels.dispatch import Implementation

Initializer = Callable[..., Array]
KERNEL_INIT: Initializer = jax.nn.initializers.lecun_normal()
BIAS_INIT: Initializer = jax.nn.initializers.zeros


@partial(
    jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=[]
)
@dataclass(frozen=True)
class LinearTiles:
    """The parameters of a linear layer, cut along both axes of its kernel.

    Attributes:
        kernel: `kernel[i][j]` is [in_i, out_j], the tile that takes part `i` of the
            input to part `j` of the output.
        bias: `bias[j]` is [out_j]; or there is none.
    """

    kernel: tuple[tuple[Float[Array, "in_i out_j"], ...], ...]
    bias: tuple[Float[Array, " out_j"], ...] | None = None

    @classmethod
    def split(
        cls,
        kernel: Float[Array, "in out"],
        bias: Float[Array, " out"] | None = None,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
    ) -> "LinearTiles":
        """The tiles of a plain layer; the first ones are longer if an axis does not
        divide.

        Raises:
            ValueError: an axis is shorter than its number of tiles.
        """
        rows = split(kernel, in_splits, axis=0)
        tiles = tuple(split(row, out_splits, axis=1) for row in rows)
        return cls(tiles, None if bias is None else split(bias, out_splits))

    @classmethod
    def init(
        cls,
        key: jax.Array,
        shape: tuple[int, int],
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        dtype: Any = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer | None = BIAS_INIT,
    ) -> "LinearTiles":
        """The tiles of `kernel_init(key, shape, dtype)`, with the plain layer's
        numbers.

        The bias is made with a key folded from `key`. `zinf.initialize` makes one tile
        at a time. For each tile XLA:CPU makes the whole kernel and keeps the tile.

        Args:
            shape: lengths of input and output.
            bias_init: None for a layer without bias.
        """
        kernel = kernel_init(key, shape, dtype)
        bias = None
        if bias_init is not None:
            bias = bias_init(jax.random.fold_in(key, 1), shape[1:], dtype)
        return cls.split(kernel, bias, in_splits=in_splits, out_splits=out_splits)

    def join(self) -> tuple[Float[Array, "in out"], Float[Array, " out"] | None]:
        """Kernel and bias of the plain layer."""
        kernel = join([join(row) for row in self.kernel], axis=0)
        return kernel, None if self.bias is None else join(self.bias)

    @property
    def in_sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the input."""
        return tuple(row[0].shape[0] for row in self.kernel)

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the output."""
        return tuple(tile.shape[1] for tile in self.kernel[0])


def linear(
    tiles: LinearTiles,
    x: Float[Array, "*batch in"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """x @ kernel + bias, tile by tile.

    Rounding: the matmul of each tile is rounded to the dtype of the layer. Matmuls
    are summed over tiles of the input in float32 (float64 of float64), and so are
    gradients by `x` over tiles of the output; each sum is rounded once. Let u be the
    unit of rounding, 2**-24 for float32 and 2**-8 for bfloat16. Then the result differs
    from the plain form by at most 2 u times the sum of the magnitudes of the matmuls,
    besides the different order of summation. Without `in_splits` the result is
    bit-equal to the plain form, if a matmul does not depend on its number of columns.
    A kernel, on Hopper GPUs, rounds only the result, and is differentiable in reverse
    only.

    Args:
        implementation: of the matmuls; see `zinf.tiling.matmul.affine`.

    Raises:
        ValueError: the input is not as long as the layer's, or the implementation
            cannot run.
    """
    if x.shape[-1:] != (sum(tiles.in_sizes),):
        raise ValueError(
            f"x has shape {x.shape}, but the tiles take {sum(tiles.in_sizes)} features "
            f"({' + '.join(map(str, tiles.in_sizes))})."
        )
    parts = cut(x, tiles.in_sizes)
    return join(linear_parts(tiles, parts, implementation=implementation))


def linear_parts(
    tiles: LinearTiles,
    parts: Sequence[Float[Array, "*batch in_i"]],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch out_j"], ...]:
    """`linear` from parts of the input to parts of the output, which are not joined.

    So the outputs of a layer can go to the inputs of the next one.

    Raises:
        ValueError: the parts are not as long as the tiles.
    """
    found = tuple(part.shape[-1] for part in parts)
    if found != tiles.in_sizes:
        raise ValueError(
            f"The parts have {found} features and the tiles take {tiles.in_sizes}."
        )
    dtype = jnp.result_type(*parts, *tiles.kernel[0][:1])
    num_out = len(tiles.out_sizes)
    readable = [shared(part.astype(dtype), num_out) for part in parts]
    return tuple(
        affine(
            [part.astype(dtype) for part in readable],
            [row[j] for row in tiles.kernel],
            None if tiles.bias is None else tiles.bias[j],
            implementation=implementation,
        )
        for j in range(num_out)
    )
