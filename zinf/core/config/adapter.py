"""The `adapter` section: low-rank adapters, under the names of the PEFT library."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zinf.core.config.scalar import Count, Flag, Folder, Fraction, Number, Text
from zinf.core.config.section import Section, Violation

ALL_LINEAR = "all-linear"


def _many(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[Text | tuple[Text, ...], BeforeValidator(_many)]


class Adapter(Section):
    """Trains a product of two thin matrices beside each weight, which is frozen."""

    r: Count = 8
    """Rank of the product."""

    lora_alpha: Annotated[Number, Field(gt=0)] = 8.0
    """The product is scaled by lora_alpha / r."""

    lora_dropout: Fraction = 0.0
    """Share of the product's inputs that is dropped while training."""

    target_modules: Names = ALL_LINEAR
    """Which weights get adapters. all-linear: those that are multiplied by activations,
    without embeddings, routers and the output head. A text is a regular expression for
    a whole name, a list has endings of names. A name is the key path of a leaf or of
    the module that holds it, with "." or "/" between its parts."""

    exclude_modules: Names = ()
    """Weights that get none, named as in target_modules."""

    modules_to_save: Names = ()
    """Leaves that are trained whole and saved with the adapters."""

    use_rslora: Flag = False
    """Scale by lora_alpha / sqrt(r), https://arxiv.org/abs/2312.03732."""

    use_dora: Flag = False
    """Train the length of each column apart, https://arxiv.org/abs/2402.09353."""

    init_lora_weights: Flag | Literal["gaussian"] = True
    """True: lora_A uniform as in torch's Linear, lora_B zero. gaussian: lora_A normal.
    False: lora_B random too, so that the adapters act from the first step."""

    quantize_base: Literal["int8", "nf4"] | None = None
    """Keep the frozen weights that are multiplied by activations in blocks of 8 or 4
    bits, https://arxiv.org/abs/2305.14314; null: as they are."""

    quantize_block: Annotated[Count, Field(multiple_of=2)] = 64
    """Numbers that share a scale."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the first values."""

    begin_from: Folder | None = None
    """Folder of a saved adapter, of zinf or of PEFT, whose values are the first ones;
    null: they are made."""

    def violations(self) -> Iterator[Violation]:
        for key in ("target_modules", "exclude_modules", "modules_to_save"):
            value = getattr(self, key)
            if isinstance(value, str) and value != ALL_LINEAR:
                try:
                    re.compile(value)
                except re.error as error:
                    yield (key,), f"{value!r} is no regular expression: {error}."
        if not self.target_modules:
            yield ("target_modules",), f"is empty. Name weights, or write {ALL_LINEAR}."
