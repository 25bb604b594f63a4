"""Images of one size: LLaVA, Gemma 3, and Idefics 3 with SmolVLM, which cut them."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.interop import jax_view, torch_view

from zinf.hf.images.kind import AbstractKind, Arrays, Specs
from zinf.hf.images.placing import replaced

PIXELS, MASK = "pixel_values", "patch_attention_mask"


@dataclass(frozen=True)
class Tiles(AbstractKind):
    """Models whose images, or parts of images, all have the size of the tower.

    Attributes:
        has_types: image tokens of an image see each other, as `token_type_ids` says.
    """

    tower: str = "vision_tower"
    has_types: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        return (PIXELS,)

    @property
    def sees_ahead(self) -> bool:
        return self.has_types

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a tile."""
        vision = self.config.vision_config
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return getattr(vision, "num_channels", 3), height, width

    @property
    def tokens_of(self) -> tuple[int, int]:
        return self._num_tokens(), 1

    def _num_tokens(self) -> int:
        if self.has_types:
            return self.config.mm_tokens_per_image
        _, height, width = self.shape
        patch_size = self.config.vision_config.patch_size
        is_whole = self.config.vision_feature_select_strategy == "full"
        return (height // patch_size) * (width // patch_size) + is_whole

    def specs(self, rows: int, room: int, length: int) -> Specs:
        del length
        return {PIXELS: jax.ShapeDtypeStruct((rows, room, *self.shape), np.float32)}

    def num_made(self, images: Mapping[str, Any]) -> int:
        return len(self._pixels(images))

    def read(self, images: Mapping[str, Any], ids: np.ndarray, module: Any) -> Arrays:
        del ids, module
        return {PIXELS: self._pixels(images)}

    def _pixels(self, images: Mapping[str, Any]) -> np.ndarray:
        """Tiles, float32 (tiles, channels, height, width)."""
        if not images:
            return np.zeros((0, *self.shape), np.float32)
        pixels = np.asarray(images[PIXELS], np.float32)
        found = pixels.shape[-3:]
        if found != self.shape:
            raise ValueError(
                f"the processor makes images of {list(found)} (channels, height, "
                f"width), and the model takes {list(self.shape)}"
            )
        return pixels.reshape(-1, *self.shape)

    def filled(self, leaves: Arrays, room: int, length: int) -> dict[str, np.ndarray]:
        pixels = np.zeros((room, *self.shape), np.float32)
        pixels[: len(leaves[PIXELS])] = leaves[PIXELS]
        return {PIXELS: pixels}

    def cut(self, batch: Arrays, room: int) -> dict[str, np.ndarray]:
        return dict(batch) | {n: batch[n][:, :room] for n in self.leaves}

    def num_given(self, leaves: Arrays) -> np.ndarray:
        # Filling is 0, which no image is after it was normalized: as in transformers.
        is_given = np.any(leaves[PIXELS], axis=(2, 3, 4))
        places = np.arange(1, is_given.shape[1] + 1)
        return np.max(is_given * places, axis=1, initial=0)

    def inputs(
        self, leaves: Mapping[str, jax.Array], dtype: Any
    ) -> dict[str, jax.Array]:
        pixels = leaves[PIXELS]
        return {PIXELS: pixels.reshape(-1, *pixels.shape[2:]).astype(dtype)}

    def types(self, is_image_BT: jax.Array) -> dict[str, jax.Array]:
        types = {"token_type_ids": is_image_BT.astype(jnp.int32)}
        return types if self.has_types else {}

    def within(
        self, inner: torch.nn.Module, leaves: Mapping[str, jax.Array]
    ) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class MaskedTiles(Tiles):
    """Tiles of which a mask says which patches are of the image (Idefics 3)."""

    tower: str = "vision_model"

    @property
    def leaves(self) -> tuple[str, ...]:
        return (PIXELS, MASK)

    @property
    def _grid(self) -> tuple[int, int]:
        _, height, width = self.shape
        size = self.config.vision_config.patch_size
        return height // size, width // size

    def _num_tokens(self) -> int:
        height, width = self._grid
        return height * width // self.config.scale_factor**2

    def specs(self, rows: int, room: int, length: int) -> Specs:
        mask = jax.ShapeDtypeStruct((rows, room, *self._grid), np.bool_)
        return super().specs(rows, room, length) | {MASK: mask}

    def read(self, images: Mapping[str, Any], ids: np.ndarray, module: Any) -> Arrays:
        found = super().read(images, ids, module)
        given = images.get("pixel_attention_mask")
        if given is None:
            return {**found, MASK: np.ones((len(found[PIXELS]), *self._grid), np.bool_)}
        height, width = self._grid
        size = self.config.vision_config.patch_size
        mask = np.asarray(given).reshape(-1, height, size, width, size)
        return {**found, MASK: np.asarray(mask.any(axis=(2, 4)))}

    def filled(self, leaves: Arrays, room: int, length: int) -> dict[str, np.ndarray]:
        # A tile of which no patch is seen would give features that are no numbers.
        mask = np.ones((room, *self._grid), np.bool_)
        mask[: len(leaves[MASK])] = leaves[MASK]
        return super().filled(leaves, room, length) | {MASK: mask}

    @contextmanager
    def within(
        self, inner: torch.nn.Module, leaves: Mapping[str, jax.Array]
    ) -> Generator[None, None, None]:
        """`transformers` drops filling by its values; here it is computed."""
        mask = torch_view(leaves[MASK].reshape(-1, *leaves[MASK].shape[2:]))

        def features(pixel_values: torch.Tensor, *_: Any, **__: Any) -> Any:
            given = {"pixel_values": pixel_values, "patch_attention_mask": mask}
            outputs = inner.vision_model(**given, return_dict=True)
            found = inner.connector(outputs.last_hidden_state)
            width = jax_view(found).shape[-1]
            outputs.pooler_output = [found.reshape(-1, width)]
            return outputs

        with replaced(inner, get_image_features=features):
            yield
