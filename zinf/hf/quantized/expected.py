"""The tensors of quantized files that are not here, as config.json says they are.

Only weights that stay in few bits differ from plain ones: of methods whose weights are
decoded as they are read, what is kept does not depend on the files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zinf.core.interchange.names import listed
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.layer import LINEAR, Layer

# `quantization_config` of config.json.
Section = Mapping[str, Any]
# Classes whose weights have rows that are looked up: no method quantizes them.
TABLES = frozenset(["Embedding"])


@dataclass(frozen=True)
class Keeping:
    """Which weights stay in few bits, by a section of config.json alone.

    Attributes:
        expected: the tensors that files have of a weight that is not left out; none if
            it is another form, or no layer that the section is about.
        left_out: the entries of layers that the section leaves plain; None: it does
            not say.
        is_named: whether an entry means a layer.
        usually: the entries of those that programs leave plain if nobody says which.
    """

    expected: Callable[[Layer, Section], Mapping[str, ArraySpec]]
    left_out: Callable[[Section], Sequence[str] | None]
    is_named: Callable[[Layer, str], bool]
    usually: Sequence[str] = ()

    def tensors(self, weight: Layer, section: Section) -> Mapping[str, ArraySpec]:
        """What files have of a weight; none if it is plain."""
        entries = self.left_out(section)
        entries = self.usually if entries is None else entries
        if any(self.is_named(weight, entry) for entry in entries):
            return {}
        return self.expected(weight, section)

    def assumed(
        self, weights: Sequence[Layer], modules: Sequence[Layer], section: Section
    ) -> list[str]:
        """What a section does not decide, and what is assumed of it; a sentence each.

        Args:
            weights: those with several dims.
            modules: all of the model.
        """
        entries, found = self.left_out(section), []
        if entries is None:
            found.append(
                "it does not say which layers are plain (ignore), so these are as "
                f"usual: {listed(self.usually)}"
            )
        every = (*modules, *weights)
        unknown = [
            entry
            for entry in entries or ()
            if not any(self.is_named(layer, entry) for layer in every)
        ]
        known = {name for layer in every for name in layer.names}
        unknown += [x for x in section.get("quantized_layers") or () if x not in known]
        if unknown:
            found.append(f"it names {listed(unknown)}, which are not in the model")
        others = [x.names[0] for x in weights if self._may_be_linear(x, section)]
        if others:
            found.append(
                f"it may mean {listed(others)}, which are counted as plain: in some "
                "versions of transformers they are linear layers, and not in this one"
            )
        return found

    def _may_be_linear(self, weight: Layer, section: Section) -> bool:
        """Whether files would have a weight in few bits if its class were another."""
        if weight.kinds & {LINEAR, *TABLES} or self.tensors(weight, section):
            return False
        linear = replace(weight, kinds=weight.kinds | {LINEAR})
        return bool(self.tensors(linear, section))


class Expected(AbstractTensors):
    """Tensors of which shapes and dtypes are known, and no content."""

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        self.specs = specs

    def block(self, name: str) -> tuple[int, ...]:
        return self.specs[name].shape

    def read(self, name: str, box: Box) -> Any:
        raise AssertionError(f"{name} is in files that are not here")
