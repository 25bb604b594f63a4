"""Images of any size as patches, with a grid each: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

What `transformers` computes from the grids (positions, windows, which patches see each
other) depends on their values. It is computed on the host, by the functions of
`transformers`, and is in the batch.
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.interop import jax_view, torch_view
from transformers import AttentionInterface, vision_utils

from zinf.hf.images.kind import AbstractKind, Arrays, Specs
from zinf.hf.images.placing import replaced
from zinf_kernels.attention import attention

# `transformers` gives lengths of images, and not one call an image, to an attention
# with "flash" in its name. The lengths are the segments of `SEGMENTS` here.
NAME = "zinf_flash_segments"
PIXELS, POSITIONS, SEGMENTS = "pixel_values", "patch_positions", "patch_segments"
WINDOWS, WINDOW_SEGMENTS = "patch_windows", "window_segments"
TAPS, WEIGHTS = "patch_taps", "patch_weights"
# What the processor says of each image: its patches in time, height and width.
GRID = "image_grid_thw"
# Positions of tokens in time, height and width.
PLACES = "position_ids"
# The segment of filling.
NONE = -1


@dataclass(frozen=True)
class Patches(AbstractKind):
    """Models that read the patches of all images as one sequence.

    Attributes:
        has_windows: most layers of the tower see windows alone (Qwen2.5-VL).
        has_table: positions in the tower are interpolated from a table (Qwen3-VL).
    """

    tower: str = "visual"
    has_windows: bool = False
    has_table: bool = False

    pieces = "patches"

    @property
    def leaves(self) -> tuple[str, ...]:
        windows = (WINDOWS, WINDOW_SEGMENTS) if self.has_windows else ()
        table = (TAPS, WEIGHTS) if self.has_table else ()
        return (PIXELS, POSITIONS, SEGMENTS, *windows, *table, PLACES)

    @property
    def unit(self) -> int:
        return self.config.vision_config.spatial_merge_size**2

    @property
    def tokens_of(self) -> tuple[int, int]:
        return 1, self.unit

    @property
    def width(self) -> int:
        """Numbers of a patch."""
        vision = self.config.vision_config
        return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def _empty(self, room: int, length: int) -> dict[str, np.ndarray]:
        """The leaves of a row of filling alone."""
        found = {
            PIXELS: np.zeros((room, self.width), np.float32),
            POSITIONS: np.zeros((room, 2), np.int32),
            SEGMENTS: np.full(room, NONE, np.int32),
            PLACES: np.zeros((3, length), np.int32),
        }
        if self.has_windows:
            found[WINDOWS] = np.arange(room // self.unit, dtype=np.int32)
            found[WINDOW_SEGMENTS] = np.full(room, NONE, np.int32)
        if self.has_table:
            found[TAPS] = np.zeros((room, 4), np.int32)
            found[WEIGHTS] = np.zeros((room, 4), np.float32)
        return found

    def specs(self, rows: int, room: int, length: int) -> Specs:
        empty = self._empty(room, length)
        return {
            n: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for n, x in empty.items()
        }

    def num_made(self, images: Mapping[str, Any]) -> int:
        if not images:
            return 0
        *_, width = np.shape(images[PIXELS])
        if width != self.width:
            raise ValueError(
                f"the processor makes patches of {width} numbers, and the model takes "
                f"{self.width}"
            )
        merge = self.config.vision_config.spatial_merge_size
        for grid in np.asarray(images[GRID]):
            if np.any(grid[1:] % merge):
                raise ValueError(
                    f"the processor makes grids of {' x '.join(map(str, grid[1:]))} "
                    f"patches, and the model joins {merge} x {merge}"
                )
        return len(images[PIXELS])

    def read(self, images: Mapping[str, Any], ids: np.ndarray, module: Any) -> Arrays:
        length = len(ids)
        if not images:
            text = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
            return self._empty(0, length) | {PLACES: text}
        pixels = np.asarray(images[PIXELS], np.float32)
        grid = torch.tensor(np.asarray(images[GRID])).long()
        merge = self.config.vision_config.spatial_merge_size
        positions = vision_utils.get_vision_position_ids(grid, merge)
        found = {
            PIXELS: pixels,
            POSITIONS: positions.numpy().astype(np.int32),
            SEGMENTS: _segments(vision_utils.get_vision_cu_seqlens(grid)),
            PLACES: self._position_ids(ids, grid, module),
        }
        if self.has_windows:
            vision = self.config.vision_config
            sizes = vision.window_size, vision.patch_size
            index, ends = vision_utils.get_vision_window_index(grid, merge, *sizes)
            found[WINDOWS] = index.numpy().astype(np.int32)
            found[WINDOW_SEGMENTS] = _segments(ends)
        if self.has_table:
            visual = getattr(module.model, self.tower)
            taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            found[TAPS] = taps.numpy().astype(np.int32)
            found[WEIGHTS] = weights.numpy().astype(np.float32)
        return found

    def _position_ids(self, ids: np.ndarray, grid: Any, module: Any) -> np.ndarray:
        """Positions of tokens in time, height and width, int32 (3, tokens)."""
        tokens = torch.tensor(ids).long()[None]
        types = (tokens == self.config.image_token_id).int()
        try:
            found, _ = module.model.get_rope_index(tokens, types, image_grid_thw=grid)
        except RuntimeError:
            raise ValueError(
                "the processor puts images side by side, and transformers counts "
                "positions of such as of one image. Use the model's chat template, "
                "which has tokens around each image"
            ) from None
        return found[:, 0].numpy().astype(np.int32)

    def filled(self, leaves: Arrays, room: int, length: int) -> dict[str, np.ndarray]:
        found = self._empty(room, length)
        for name, values in leaves.items():
            if name == PLACES:
                found[name][:, : values.shape[1]] = values
            else:
                found[name][: len(values)] = values
        return found

    def cut(self, batch: Arrays, room: int) -> dict[str, np.ndarray]:
        found = dict(batch)
        for name in self.leaves:
            if name != PLACES:
                count = room // self.unit if name == WINDOWS else room
                found[name] = batch[name][:, :count]
        return found

    def num_given(self, leaves: Arrays) -> np.ndarray:
        return np.count_nonzero(leaves[SEGMENTS] != NONE, axis=1)

    def inputs(
        self, leaves: Mapping[str, jax.Array], dtype: Any
    ) -> dict[str, jax.Array]:
        found = {PIXELS: leaves[PIXELS].reshape(-1, self.width).astype(dtype)}
        if PLACES in leaves:
            found[PLACES] = leaves[PLACES].swapaxes(0, 1)
        return found

    @contextmanager
    def within(
        self, inner: torch.nn.Module, leaves: Mapping[str, jax.Array]
    ) -> Generator[None, None, None]:
        AttentionInterface.register(NAME, attend)
        visual = getattr(inner, self.tower)
        computed = self._computed(leaves)

        def features(pixel_values: torch.Tensor, *_: Any, **__: Any) -> Any:
            outputs = visual(pixel_values, None, return_dict=True, **computed)
            outputs.pooler_output = [outputs.pooler_output]
            if self.has_table:
                deep = outputs.deepstack_features
                outputs.deepstack_features = [[found] for found in deep]
            return outputs

        configs = [m.config for m in visual.modules() if hasattr(m, "config")]
        with ExitStack() as stack:
            for config in {id(config): config for config in configs}.values():
                named = {"_attn_implementation_internal": NAME}
                stack.enter_context(replaced(config, **named))
            stack.enter_context(replaced(inner, get_image_features=features))
            yield

    def _computed(self, leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
        """What the tower of `transformers` takes in place of computing with grids."""
        rows, room = leaves[SEGMENTS].shape
        found: dict[str, Any] = {
            "position_ids": torch_view(leaves[POSITIONS].reshape(-1, 2)),
            "cu_seqlens": torch_view(leaves[SEGMENTS]),
            # A number is asked for, which no attention of zinf reads.
            "max_seqlen": room,
        }
        if self.has_windows:
            first = jnp.arange(rows, dtype=jnp.int32)[:, None] * (room // self.unit)
            found["window_index"] = torch_view((leaves[WINDOWS] + first).reshape(-1))
            found["cu_window_seqlens"] = torch_view(leaves[WINDOW_SEGMENTS])
            found["max_window_seqlen"] = room
        if self.has_table:
            found["interp_indices"] = torch_view(leaves[TAPS].reshape(-1, 4))
            found["interp_weights"] = torch_view(leaves[WEIGHTS].reshape(-1, 4))
        return found


def _segments(ends: torch.Tensor) -> np.ndarray:
    """The number of its segment for each patch, from the ends of segments."""
    lengths = np.diff(ends.numpy())
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of patches, as `transformers` calls it for several images at once.

    Args:
        query, key, value: (1, heads, rows * patches, width).
        cu_seq_lens_q: segments, int32 (rows, patches): a patch sees those of its own.

    Returns:
        (1, rows * patches, heads, width), and None for the weights.
    """
    del module, attention_mask
    assert not dropout, "no tower of these families has dropout"
    segments = jax_view(cu_seq_lens_q)
    rows, room = segments.shape

    def by_row(x: torch.Tensor) -> jax.Array:
        _, heads, _, width = x.shape
        return jax_view(x)[0].swapaxes(0, 1).reshape(rows, room, heads, width)

    out = attention(
        by_row(query),
        by_row(key),
        by_row(value),
        scale=scaling,
        q_segments=segments,
        k_segments=segments,
    )
    return torch_view(out.reshape(1, rows * room, *out.shape[2:])), None
