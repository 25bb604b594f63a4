"""The tiled layers as Flax NNX modules, with the numbers of `nnx.Linear`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from zinf.tiling.linear import (
    BIAS_INIT,
    KERNEL_INIT,
    Initializer,
    LinearTiles,
    linear,
)
from zinf.tiling.mlp import MlpTiles, mlp
from zinf_kernels.dispatch import Implementation


class TiledLinear(nnx.Module):
    """`nnx.Linear` with each tile of its kernel and bias an `nnx.Param`.

    With the same `rngs` it has the same numbers: `LinearTiles.join` of `tiles` gives
    the kernel and bias of `nnx.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        use_bias: bool = True,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        self.implementation = implementation
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        bias = None
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
        splits = {"in_splits": in_splits, "out_splits": out_splits}
        self.tiles = _params(LinearTiles.split(kernel, bias, **splits))

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return linear(_values(self.tiles), x, implementation=self.implementation)


class TiledMlp(nnx.Module):
    """`mlp` with each tile of its kernels and biases an `nnx.Param`.

    The numbers are those of `nnx.Linear` for up, down and, if gated, gate, made in this
    order with the same `rngs`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        splits: int,
        tile_rows: int | None = None,
        is_gated: bool = False,
        use_bias: bool = True,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        self.activation, self.tile_rows = activation, tile_rows
        self.implementation = implementation
        shapes = {"up": (dim, hidden), "down": (hidden, dim), "gate": (dim, hidden)}
        biases = {"up": "up_bias", "down": "bias", "gate": "gate_bias"}
        made: dict[str, Any] = {}
        for name in ("up", "down", "gate")[: 3 if is_gated else 2]:
            made[name] = kernel_init(rngs.params(), shapes[name], param_dtype)
            if use_bias:
                shape = shapes[name][1:]
                made[biases[name]] = bias_init(rngs.params(), shape, param_dtype)
        self.tiles = _params(MlpTiles.split(**made, splits=splits))

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        return mlp(
            _values(self.tiles),
            x,
            activation=self.activation,
            tile_rows=self.tile_rows,
            implementation=self.implementation,
        )


def _params(tiles: Any) -> Any:
    return nnx.data(jax.tree.map(nnx.Param, tiles))


def _values(tiles: Any) -> Any:
    def is_param(x: Any) -> bool:
        return isinstance(x, nnx.Param)

    return jax.tree.map(lambda p: p[...], tiles, is_leaf=is_param)
