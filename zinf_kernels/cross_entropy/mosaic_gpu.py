"""`token_losses` for Hopper GPUs: tiles of logits are finished where they are computed.

Forward, a tile of logits becomes three numbers for each of its tokens, in registers:
the largest, the sum of exponentials relative to it, and the label's. XLA's form writes
each piece of the logits to memory and reads it twice. Backward, a tile becomes the
gradient by these logits, which goes to memory in the dtype of the model, a piece at a
time; the matmuls with it are XLA's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.cross_entropy.xla import gradients
from zinf_kernels.mosaic_matmul import (
    COMPUTE_WARPGROUPS,
    Place,
    for_tiles,
    kernel,
    transforms,
)
from zinf_kernels.pieces import for_pieces, part, put, varying_as
from zinf_kernels.tiles import TILES, Tiles

# The numbers of each token besides its vector, one row for each name.
FORWARD, BACKWARD = ("index",), ("index", "lse", "by_losses", "by_both")
NUMBERS = 3
# Gradients are written in pieces: one is filled while the other is copied out.
SLOTS, PIECE_ROWS, PIECE_COLUMNS = 2, 64, 64


@dataclass(frozen=True)
class Launch:
    """How kernels are launched: sizes of pieces, streaming multiprocessors, tiles."""

    chunks: Chunks
    num_cores: int
    tiles: Tiles


def token_losses(
    x: Float[Array, "tokens dim"],
    weight: Float[Array, "..."],
    labels: Int[Array, " tokens"],
    chunks: Chunks,
    *,
    num_cores: int,
    tiles: Tiles = TILES,
) -> tuple[Float32[Array, " tokens"], Float32[Array, " tokens"]]:
    """Loss and logsumexp of each token; sizes of pieces are multiples of tiles."""
    launch = Launch(chunks, num_cores, tiles)
    return _token_losses(x, weight, labels.astype(jnp.int32), launch)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(x: Array, weight: Array, labels: Array, launch: Launch) -> Any:
    def over_tokens(start: Any, size: int, carry: Any) -> Any:
        mine = part(x, start, size), weight, part(labels, start, size)
        numbers = statistics(*mine, launch)
        largest = jnp.max(numbers[0], axis=0)
        shares = numbers[1] * jnp.exp(numbers[0] - largest[None])
        lse = largest + jnp.log(jnp.sum(shares, axis=0))
        made = lse - jnp.sum(numbers[2], axis=0), lse
        return [put(a, b, start) for a, b in zip(carry, made, strict=True)]

    empty = varying_as(jnp.zeros(len(x), jnp.float32), x)
    losses, lse = for_pieces(len(x), launch.chunks.tokens, over_tokens, [empty, empty])
    return losses, lse


def _forward(x: Array, weight: Array, labels: Array, launch: Launch) -> Any:
    losses, lse = _token_losses(x, weight, labels, launch)
    return (losses, lse), (x, weight, labels, lse)


def _backward(launch: Launch, kept: Any, cotangents: Any) -> Any:
    return gradients(partial(slopes, launch), launch.chunks, kept, cotangents)


_token_losses.defvjp(_forward, _backward)


def statistics(
    x: Float[Array, "tokens dim"],
    weight: Float[Array, "..."],
    index: Int32[Array, " tokens"],
    launch: Launch,
) -> Float32[Array, "3 word_tiles tokens"]:
    """Largest logit, sum of exponentials and label's logit, by tile and token."""
    words = weight.shape[launch.chunks.vocab_axis] // launch.tiles.n
    result = jax.ShapeDtypeStruct((NUMBERS, words, len(x)), jnp.float32)
    shape = (COMPUTE_WARPGROUPS, NUMBERS, launch.tiles.m)
    memory = {"numbers": plgpu.SMEM(shape, jnp.float32)}

    def finish(place: Place, memory: Mapping[str, Any], logits: Any, out: Any) -> None:
        largest = jnp.max(logits, axis=1)
        exponentials = jnp.exp(logits - _across(largest, logits))
        picked = jnp.where(_is_label(place, memory, logits), logits, jnp.float32(0))
        # Wait for the last tile's copy, which ran while this one was summed.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        numbers = memory["numbers"].at[place.warpgroup]
        made = largest, jnp.sum(exponentials, axis=1), jnp.sum(picked, axis=1)
        for i, number in enumerate(made):
            numbers[i, :] = number
        plgpu.commit_smem()
        for i in range(NUMBERS):
            target = out.at[i, place.column, place.rows].at[place.mine]
            plgpu.copy_smem_to_gmem(numbers.at[i], target)

    of_tokens = dict(zip(FORWARD, (index,), strict=True))
    return _run(finish, x, weight, of_tokens, launch, result, memory, 4 * prod(shape))


def slopes(
    launch: Launch,
    x: Float[Array, "tokens dim"],
    weight: Float[Array, "..."],
    *of_tokens: Array,
) -> Float[Array, "tokens words"]:
    """Gradients by logits, in the dtype of `x`: see `xla.gradients`."""
    words = weight.shape[launch.chunks.vocab_axis]
    result = jax.ShapeDtypeStruct((len(x), words), x.dtype)
    shape = (COMPUTE_WARPGROUPS, SLOTS, PIECE_ROWS, PIECE_COLUMNS)
    leaving = plgpu.SMEM(shape, x.dtype, transforms=transforms(shape[-1], x.dtype))

    def finish(place: Place, memory: Mapping[str, Any], logits: Any, out: Any) -> None:
        lse, by_losses, by_both = (
            _across(memory[name][place.warpgroup, :], logits) for name in BACKWARD[1:]
        )
        down = jnp.where(_is_label(place, memory, logits), by_losses, jnp.float32(0))
        slope = jnp.exp(logits - lse) * by_both - down
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile = out.at[place.rows, place.columns].at[place.mine]
        for number, (row, column) in enumerate(_pieces(launch.tiles)):
            rows, columns = pl.ds(row, PIECE_ROWS), pl.ds(column, PIECE_COLUMNS)
            slot = memory["leaving"].at[place.warpgroup, number % SLOTS]
            piece = slope[row : row + PIECE_ROWS, column : column + PIECE_COLUMNS]
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            slot[...] = piece.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, tile.at[rows, columns])

    given = dict(zip(BACKWARD, of_tokens, strict=True))
    return _run(
        finish, x, weight, given, launch, result, {"leaving": leaving}, 4 * prod(shape)
    )


def _run(
    finish: Callable[..., None],
    x: Array,
    weight: Array,
    of_tokens: Mapping[str, Array],
    launch: Launch,
    result: jax.ShapeDtypeStruct,
    memory: Mapping[str, Any],
    own_bytes: int,
) -> Array:
    """All tiles of logits, each with its tokens' numbers in shared memory."""
    lines = (COMPUTE_WARPGROUPS, launch.tiles.m)
    came = plgpu.Barrier(num_arrivals=len(of_tokens), num_barriers=COMPUTE_WARPGROUPS)
    memory = {**memory, "came": came} | {
        name: plgpu.SMEM(lines, a.dtype) for name, a in of_tokens.items()
    }
    memory_bytes = own_bytes + 4 * len(of_tokens) * prod(lines)

    def body(x_ref: Any, weight_ref: Any, *refs: Any) -> None:
        *token_refs, out = refs

        def begin(place: Place, memory: Mapping[str, Any]) -> None:
            for name, ref in zip(of_tokens, token_refs, strict=True):
                target = memory[name].at[place.warpgroup]
                source = ref.at[place.rows].at[place.mine]
                barrier = memory["came"].at[place.warpgroup]
                plgpu.copy_gmem_to_smem(source, target, barrier)

        def end(place: Place, memory: Mapping[str, Any], sums: Any) -> None:
            plgpu.barrier_wait(memory["came"].at[place.warpgroup])
            finish(place, memory, sums[...], out)

        for_tiles(
            begin,
            end,
            x_ref,
            weight_ref,
            tiles=launch.tiles,
            memory=memory,
            memory_bytes=memory_bytes,
            is_transposed=not launch.chunks.vocab_axis,
        )

    flops = 2 * len(x) * weight.size
    made = kernel(body, result, num_cores=launch.num_cores, flops=flops)
    return made(x, weight, *of_tokens.values())


def _is_label(place: Place, memory: Mapping[str, Any], logits: Any) -> Any:
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    index = memory["index"][place.warpgroup, :] - place.column * logits.shape[1]
    return columns == _across(index, logits)


def _across(numbers: Any, like: Any) -> Any:
    """One number for each row, broadcast over columns."""
    return lax.broadcast_in_dim(numbers, like.shape, (0,))


def _pieces(tiles: Tiles) -> list[tuple[int, int]]:
    return [
        (row, column)
        for row in range(0, tiles.m, PIECE_ROWS)
        for column in range(0, tiles.n, PIECE_COLUMNS)
    ]
