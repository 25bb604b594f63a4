"""A transformer's MLP in tiles of its hidden layer and of the sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf.tiling.linear import BIAS_INIT, KERNEL_INIT, Initializer
from zinf.tiling.matmul import affine
from zinf.tiling.rows import over_rows
from zinf.tiling.splits import join, plus, shared, split
from zinf_kernels.dispatch import Implementation

Activation = Callable[[Array], Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["up", "down", "gate", "up_bias", "gate_bias"],
    meta_fields=[],
)
@dataclass(frozen=True)
class HiddenTile:
    """The parameters into and out of some hidden units."""

    up: Float[Array, "dim hidden"]
    down: Float[Array, "hidden out"]
    gate: Float[Array, "dim hidden"] | None = None
    up_bias: Float[Array, " hidden"] | None = None
    gate_bias: Float[Array, " hidden"] | None = None

    def __call__(
        self,
        x: Float[Array, "*batch dim"],
        activation: Activation,
        implementation: Implementation = None,
    ) -> Float[Array, "*batch out"]:
        """The part of the output that these units give."""

        def matmul(x: Array, kernel: Array, bias: Array | None = None) -> Array:
            bias = None if bias is None else bias.astype(x.dtype)
            return affine([x], [kernel], bias, implementation=implementation)

        hidden = matmul(x, self.up, self.up_bias)
        if self.gate is None:
            hidden = activation(hidden)
        else:
            hidden = activation(matmul(x, self.gate, self.gate_bias)) * hidden
        return matmul(hidden, self.down)


@partial(
    jax.tree_util.register_dataclass, data_fields=["hidden", "bias"], meta_fields=[]
)
@dataclass(frozen=True)
class MlpTiles:
    """The parameters of an MLP, cut along its hidden layer; the last bias is whole."""

    hidden: tuple[HiddenTile, ...]
    bias: Float[Array, " out"] | None = None

    @classmethod
    def split(
        cls,
        up: Float[Array, "dim hidden"],
        down: Float[Array, "hidden out"],
        *,
        gate: Float[Array, "dim hidden"] | None = None,
        up_bias: Float[Array, " hidden"] | None = None,
        gate_bias: Float[Array, " hidden"] | None = None,
        bias: Float[Array, " out"] | None = None,
        splits: int,
    ) -> "MlpTiles":
        """The tiles of a plain MLP; the first are longer if the hidden axis does not
        divide.

        Raises:
            ValueError: the hidden layer is shorter than the number of tiles.
        """

        def tiles(x: Array | None, axis: int = -1) -> tuple[Array | None, ...]:
            return (None,) * splits if x is None else split(x, splits, axis=axis)

        parts: Any = (
            tiles(up),
            tiles(down, 0),
            *map(tiles, (gate, up_bias, gate_bias)),
        )
        return cls(tuple(map(HiddenTile, *parts)), bias)

    @classmethod
    def init(
        cls,
        key: jax.Array,
        dim: int,
        hidden: int,
        *,
        splits: int,
        is_gated: bool = False,
        dtype: Any = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer | None = BIAS_INIT,
    ) -> "MlpTiles":
        """The tiles of an MLP whose kernels are made with `jax.random.split(key, 3)`.

        In the order up, down, gate; biases with a key folded from their kernel's.

        Args:
            is_gated: whether there is a gate, as in SwiGLU.
            bias_init: None for an MLP without biases.
        """
        shapes = {"up": (dim, hidden), "down": (hidden, dim), "gate": (dim, hidden)}
        biases = {"up": "up_bias", "down": "bias", "gate": "gate_bias"}
        made: dict[str, Any] = {}
        for (name, shape), k in zip(
            shapes.items(), jax.random.split(key, 3), strict=True
        ):
            if name == "gate" and not is_gated:
                continue
            made[name] = kernel_init(k, shape, dtype)
            if bias_init is not None:
                fold = jax.random.fold_in(k, 1)
                made[biases[name]] = bias_init(fold, shape[1:], dtype)
        return cls.split(**made, splits=splits)

    def join(self) -> dict[str, Array | None]:
        """The arguments of `split`, but for `splits`."""
        axes = {"up": -1, "down": 0, "gate": -1, "up_bias": -1, "gate_bias": -1}
        joined = {}
        for name, axis in axes.items():
            tiles = [getattr(tile, name) for tile in self.hidden]
            joined[name] = None if tiles[0] is None else join(tiles, axis=axis)
        return joined | {"bias": self.bias}


def mlp(
    tiles: MlpTiles,
    x: Float[Array, "*batch dim"],
    *,
    activation: Activation = jax.nn.gelu,
    tile_rows: int | None = None,
    axis: int = -2,
    implementation: Implementation = None,
) -> Float[Array, "*batch out"]:
    """activation(x @ up) @ down with biases, or activation(x @ gate) * (x @ up) @ down.

    No activation of the hidden layer outlives its tile: the backward pass recomputes
    it, with 8 matmuls where the plain form has 6. zinf streams one tile after the
    other. Under plain `jax.jit` XLA may run several at once, unless `tile_rows` makes a
    loop of each. Rounding is as in `linear`: the matmuls with `down`, and the
    gradients by `x`, are summed over tiles.

    Args:
        activation: applied to the gate or, without a gate, to the hidden layer.
        tile_rows: rows of `x` along `axis` at a time; by default all. See `over_rows`.
        axis: of the rows, by default that of the sequence.
        implementation: of the matmuls; see `zinf.tiling.matmul.affine`.
    """
    dtype = jnp.result_type(x, tiles.hidden[0].up)

    def add(tile: HiddenTile, x: Array) -> Array:
        return tile(x, activation, implementation)

    run = jax.checkpoint(add)
    if tile_rows is not None:
        run = partial(over_rows, add, tile_rows=tile_rows, axis=axis)
    wide = shared(x.astype(dtype), len(tiles.hidden))
    # A generator, so that the input of a tile is not converted before its turn.
    matmuls = (run(tile, wide.astype(dtype)) for tile in tiles.hidden)
    out = reduce(plus, matmuls).astype(dtype)
    return out if tiles.bias is None else out + _line(tiles.bias, out)


def _line(bias: Array, like: Array) -> Array:
    """A bias with the rank and dtype of `like`, as ranks may not be promoted."""
    return jnp.expand_dims(bias, tuple(range(like.ndim - 1))).astype(like.dtype)
