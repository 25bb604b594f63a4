"""`matmul` for Hopper GPUs: matmuls of tiles, then the sums, piece by piece.

The first pieces of a residual are fetched while the matmul is computed. One piece of
the result is filled while the other is copied out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from zinf_kernels.mosaic_matmul import (
    COMPUTE_WARPGROUPS,
    Place,
    for_tiles,
    kernel,
    transforms,
)
from zinf_kernels.tiles import TILES, Tiles

# Pieces of the result for each warpgroup: one is filled while the other is copied.
SLOTS = 2
PIECE_ROWS = 64
# A row of a piece: as wide as the widest swizzle.
PIECE_ROW_BYTES = 128


@partial(jax.jit, static_argnames=("out_dtype", "num_cores", "tiles"))
def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    bias: Float[Array, " n"] | None,
    residual: Float[Array, "m n"] | None,
    *,
    out_dtype: Any,
    num_cores: int,
    tiles: Tiles = TILES,
) -> Float[Array, "m n"]:
    """The matmul and the sums in float32; sizes are multiples of tiles."""
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), out_dtype)
    extras = [x for x in (bias, residual) if x is not None]

    def body(*refs: Any) -> None:
        a_ref, b_ref, *others, out = refs
        bias_ref = others.pop(0) if bias is not None else None
        residual_ref = others.pop(0) if residual is not None else None
        outer = _Outer(out, bias_ref, residual_ref, tiles)
        for_tiles(
            outer.fetch_first,
            outer.finish,
            a_ref,
            b_ref,
            tiles=tiles,
            memory=outer.memory(),
            memory_bytes=outer.memory_bytes,
        )

    flops = 2 * result.size * a.shape[1]
    return kernel(body, result, num_cores=num_cores, flops=flops)(a, b, *extras)


@dataclass(frozen=True)
class _Outer:
    """The result, bias and residual in device memory.

    Their copies in shared memory are named in `memory`.
    """

    out: Any
    bias: Any  # or None
    residual: Any  # or None
    tiles: Tiles

    @property
    def piece_columns(self) -> int:
        """Columns of the pieces in which a warpgroup's tile of the result is copied
        out."""
        return PIECE_ROW_BYTES // max(jnp.dtype(x).itemsize for x in self.dtypes)

    @property
    def dtypes(self) -> list[Any]:
        return [ref.dtype for ref in (self.out, self.residual) if ref is not None]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Row and column of each piece in the tile."""
        return [
            (i, j)
            for i in range(0, self.tiles.m, PIECE_ROWS)
            for j in range(0, self.tiles.n, self.piece_columns)
        ]

    def memory(self) -> dict[str, Any]:
        """Shared memory of a block besides the factors, and barriers for fetches."""
        slots = COMPUTE_WARPGROUPS * SLOTS
        made: dict[str, Any] = {"leaving": self._slots(self.out.dtype)}
        if self.residual is not None:
            made["coming"] = self._slots(self.residual.dtype)
            made["came"] = plgpu.Barrier(num_barriers=slots)
        if self.bias is not None:
            shape = (COMPUTE_WARPGROUPS, self.tiles.n)
            made["biases"] = plgpu.SMEM(shape, jnp.float32)
            made["bias_came"] = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS)
        return made

    @property
    def memory_bytes(self) -> int:
        """An upper bound of the bytes of `memory`."""
        numel = COMPUTE_WARPGROUPS * SLOTS * PIECE_ROWS * self.piece_columns
        itemsizes = sum(jnp.dtype(dtype).itemsize for dtype in self.dtypes)
        return numel * itemsizes + 4 * COMPUTE_WARPGROUPS * self.tiles.n

    def _slots(self, dtype: Any) -> Any:
        shape = (COMPUTE_WARPGROUPS, SLOTS, PIECE_ROWS, self.piece_columns)
        return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], dtype))

    def fetch_first(self, place: Place, memory: Mapping[str, Any]) -> None:
        """Starts to fetch the bias and the first pieces of the residual."""
        if self.bias is not None:
            plgpu.copy_gmem_to_smem(
                self.bias.at[place.columns],
                memory["biases"].at[place.warpgroup],
                memory["bias_came"].at[place.warpgroup],
            )
        if self.residual is not None:
            for number in range(min(SLOTS, len(self.offsets))):
                self.fetch(number, place, memory)

    def fetch(self, number: int, place: Place, memory: Mapping[str, Any]) -> None:
        """Starts to fetch a piece of the residual."""
        slot = number % SLOTS
        plgpu.copy_gmem_to_smem(
            self.piece_of(self.residual, self.offsets[number], place),
            memory["coming"].at[place.warpgroup, slot],
            memory["came"].at[place.warpgroup * SLOTS + slot],
        )

    def piece_of(self, ref: Any, offset: tuple[int, int], place: Place) -> Any:
        tile = ref.at[place.rows, place.columns].at[place.mine]
        row, column = offset
        return tile.at[pl.ds(row, PIECE_ROWS), pl.ds(column, self.piece_columns)]

    def finish(self, place: Place, memory: Mapping[str, Any], sums: Any) -> None:
        """Adds bias and residual to the matmul and copies it out, piece by piece."""
        matmul, warpgroup = sums[...], place.warpgroup
        if self.bias is not None:
            plgpu.barrier_wait(memory["bias_came"].at[warpgroup])
        # Wait for the last tile's copies, which ran while this one was summed.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        leaving = memory["leaving"]
        for number, (row, column) in enumerate(self.offsets):
            slot = number % SLOTS
            there = slice(column, column + self.piece_columns)
            part = matmul[row : row + PIECE_ROWS, there]
            line, extra = self.joining(number, there, place, memory)
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            part = part if line is None else part + line
            part = part if extra is None else part + extra.astype(part.dtype)
            leaving[warpgroup, slot] = part.astype(self.out.dtype)
            # Also ends all reads of the residual's slot.
            plgpu.commit_smem()
            target = self.piece_of(self.out, (row, column), place)
            plgpu.copy_smem_to_gmem(leaving.at[warpgroup, slot], target)
            if self.residual is not None and number + SLOTS < len(self.offsets):
                self.fetch(number + SLOTS, place, memory)

    def joining(
        self, number: int, there: slice, place: Place, memory: Mapping[str, Any]
    ) -> tuple[Any | None, Any | None]:
        """Bias and residual of a piece, as arrays to add; None for an absent one."""
        warpgroup, line, extra = place.warpgroup, None, None
        if self.bias is not None:
            line = memory["biases"][warpgroup, there]
            shape = PIECE_ROWS, self.piece_columns
            line = lax.broadcast_in_dim(line, shape, (1,))
        if self.residual is not None:
            slot = number % SLOTS
            plgpu.barrier_wait(memory["came"].at[warpgroup * SLOTS + slot])
            extra = memory["coming"][warpgroup, slot]
        return line, extra
