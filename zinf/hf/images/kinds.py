"""The architectures whose images zinf reads, and how."""

from collections.abc import Callable
from functools import partial

import transformers

from zinf.hf.images.kind import AbstractKind
from zinf.hf.images.patches import Patches
from zinf.hf.images.tiles import MaskedTiles, Tiles

AUTO_CLASS = "AutoModelForImageTextToText"
# By `model_type`.
KINDS: dict[str, Callable[[transformers.PretrainedConfig], AbstractKind]] = {
    "llava": Tiles,
    "gemma3": partial(Tiles, has_types=True),
    "idefics3": MaskedTiles,
    "smolvlm": MaskedTiles,
    "qwen2_vl": Patches,
    "qwen2_5_vl": partial(Patches, has_windows=True),
    "qwen3_vl": partial(Patches, has_table=True),
}


def reads_images(config: transformers.PretrainedConfig) -> bool:
    """Whether zinf reads images with models of an architecture."""
    return config.model_type in KINDS


def kind_of(config: transformers.PretrainedConfig, name: str) -> AbstractKind:
    """How a model reads images.

    Args:
        name: of the model, for the message.

    Raises:
        NotImplementedError: zinf does not read images with this architecture.
    """
    if not reads_images(config):
        raise NotImplementedError(
            f"{name} is of the architecture {config.model_type!r}, and zinf reads "
            f"images with {', '.join(KINDS)} alone. Use a model of those, or leave the "
            "images out."
        )
    return KINDS[config.model_type](config)
