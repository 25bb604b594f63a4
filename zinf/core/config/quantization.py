"""The `weight_quantization` section: weights in blocks of few bits, to run a model."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zinf.core.config.scalar import Count, Flag, Text
from zinf.core.config.section import Section, Violation


class Groups(Section):
    """How a weight is kept: groups of numbers, each with a scale."""

    num_bits: Literal[4, 8]
    """Bits of a number."""

    group_size: Annotated[Count, Field(multiple_of=2)] = 64
    """Numbers that share a scale. They lie side by side in the weight's own layout."""

    group_dim: Literal[1] = 1
    """The dim of a torch weight along which groups lie: 1, its last."""

    symmetric: Flag = False
    """Codes from minus to plus the largest magnitude of a group; else from its least
    number to its largest, which keeps 8 bytes a group in place of 4."""


class ByName(Section):
    """A section a key; the keys are parts of names."""

    @classmethod
    def known_keys(cls) -> list[str]:
        return []

    @classmethod
    def section_at(cls, key: str, siblings: object) -> type[Section] | None:
        del key, siblings
        return Groups


class WeightQuantization(Section):
    """Keeps weights of linear layers in 8 or 4 bits while a model is run.

    For generation, evaluation and scores; embeddings, norms and the output head stay as
    they are. To train adapters over such weights set adapter.quantize_base.
    """

    quantized_initialization: Groups | None = None
    """All linear layers, encoded as they are read; null: those of post_init_quant."""

    post_init_quant: dict[Text, Groups] = Field(default_factory=dict)
    """Linear layers whose names have a key in them, such as mlp or q_proj."""

    @classmethod
    def section_at(cls, key: str, siblings: object) -> type[Section] | None:
        del siblings
        return {"post_init_quant": ByName, "quantized_initialization": Groups}.get(key)

    def groups_of(self, name: str) -> Groups | None:
        """How the weights of a module are kept; None: as they are.

        Raises:
            ValueError: two keys of post_init_quant are in the name.
        """
        keys = [key for key in self.post_init_quant if key in name]
        if len(keys) > 1:
            raise ValueError(
                f"weight_quantization.post_init_quant: {keys[0]!r} and {keys[1]!r} are "
                f"both in {name!r}. Make one of them longer."
            )
        if keys:
            return self.post_init_quant[keys[0]]
        return self.quantized_initialization

    def violations(self) -> Iterator[Violation]:
        if self.quantized_initialization is None and not self.post_init_quant:
            yield (
                (),
                "says no bits. Set quantized_initialization.num_bits to 8 or 4, or "
                "null in place of the section.",
            )
