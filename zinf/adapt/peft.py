"""The tensors of a PEFT file: their names, and the arrays that they hold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from zinf.adapt.adapted import ADAPTER, Adapted
from zinf.adapt.weight import LORA_A, LORA_B, MAGNITUDE, Target

PREFIX = "base_model.model."
KERNELS = ("kernel", "weight", "w")
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# PEFT writes the frozen weight too, if an embedding or an output head has an adapter.
BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class Naming:
    """Names of leaves in the PEFT model, where key paths do not determine them.

    Attributes:
        tied: all names of a leaf that the model has in several places, with ".", by
            its key path. PEFT has an adapter for each of them.
        embeddings: names of leaves of which rows are looked up. Their factors have
            other names there.
    """

    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()

    def of(self, path: str) -> tuple[str, ...]:
        """The names of the leaf at `path` in the PEFT model."""
        return self.tied.get(path, (path.replace("/", "."),))


@dataclass(frozen=True)
class PeftTensor:
    """Which array of a run one tensor of a PEFT file holds.

    Attributes:
        leaf: its key path in the user's parameters.
        part: which factor; None: the leaf, which is trained whole.
        target: of the leaf; None if it is trained whole.
        is_turned: the leaf is tied, and here its products sum over the dim that is
            their output elsewhere, so lora_A and lora_B change places.
        is_again: another tensor, under another name of the leaf, has the same content.
    """

    leaf: str
    part: str | None
    target: Target | None
    is_turned: bool = False
    is_again: bool = False

    @property
    def path(self) -> str:
        end = "" if self.part is None else f"/{self.part}"
        return f"{ADAPTER}/{self.leaf}{end}"

    def shape(self, adapted: Adapted) -> tuple[int, ...]:
        """The shape of the tensor."""
        if self.target is None or self.part is None:
            return tuple(adapted.layout.specs[self.leaf].shape)
        shape = peft_shape(self.target, self.part)
        return shape[::-1] if self.is_turned else shape


def peft_tensors(adapted: Adapted, naming: Naming) -> dict[str, PeftTensor]:
    """For each tensor of a PEFT file, by name, the array of the run that it holds."""
    modules = [module_of(path) for path in adapted.targets]
    found = {}
    for path, target in adapted.targets.items():
        for name in naming.of(path):
            module = module_of(name)
            if modules.count(module) > 1:
                module = name
            is_again = name != naming.of(path)[0]
            for end, part, is_turned in _ends(path, name, target, naming):
                place = PeftTensor(path, part, target, is_turned, is_again)
                found[f"{PREFIX}{module}.{end}"] = place
    for path in adapted.saved:
        for name in naming.of(path):
            is_again = name != naming.of(path)[0]
            found[f"{PREFIX}{name}"] = PeftTensor(path, None, None, False, is_again)
    return found


def _ends(
    path: str, name: str, target: Target, naming: Naming
) -> Iterator[tuple[str, str, bool]]:
    """For each part: the end of its tensor's name, the part, and `is_turned`."""
    is_embedding = name in naming.embeddings
    parts = tuple(target.factor_shapes)
    is_turned = False
    if any(each in naming.embeddings for each in naming.of(path)):
        # PEFT sums over words in an embedding, and over the hidden dim in a head.
        is_turned = target.contraction.inputs != ((0,) if is_embedding else (1,))
    for part in parts:
        if part == MAGNITUDE:
            yield part, part, False
            continue
        as_named = {LORA_A: LORA_B, LORA_B: LORA_A}[part] if is_turned else part
        ending = f"{as_named}.weight"
        if is_embedding:
            ending = EMBEDDING_A if as_named == LORA_A else EMBEDDING_B
        yield ending, part, is_turned


def module_of(path: str) -> str:
    dotted = path.replace("/", ".")
    module, _, last = dotted.rpartition(".")
    return module if module and last in KERNELS else dotted


def to_peft(place: PeftTensor, array: np.ndarray) -> np.ndarray:
    target, part = place.target, place.part
    if target is None or part is None:
        return array
    count = len(target.lead)
    if part == MAGNITUDE:
        return array.reshape(peft_shape(target, part))
    sizes = (-1, target.r) if part == LORA_A else (target.r, -1)
    flat = array.reshape(*array.shape[:count], *sizes)
    return np.ascontiguousarray(flat if place.is_turned else np.swapaxes(flat, -1, -2))


def peft_shape(target: Target, part: str) -> tuple[int, ...]:
    lead = target.sizes(target.lead)
    inputs = prod(target.sizes(target.contraction.inputs))
    outputs = prod(target.sizes(target.contraction.outputs))
    if part == MAGNITUDE:
        return (*lead, outputs)
    return (*lead, target.r, inputs) if part == LORA_A else (*lead, outputs, target.r)


def from_peft(adapted: Adapted, place: PeftTensor, array: np.ndarray) -> Any:
    target, part = place.target, place.part
    if target is None or part is None:
        return array.astype(adapted.layout.specs[place.leaf].dtype)
    if part != MAGNITUDE and not place.is_turned:
        array = np.swapaxes(array, -1, -2)
    shape = target.factor_shapes[part]
    return jnp.asarray(array.reshape(shape)).astype(jnp.float32)
