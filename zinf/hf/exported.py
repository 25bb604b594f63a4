"""The tensors of a model's files, made of its parameters."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.weights import (
    Conversion,
    dims,
    meta_tensor,
    spec_of,
    to_numpy,
    to_torch,
)


@dataclass(frozen=True)
class _Source:
    """Where an exported tensor comes from: the i-th result of a conversion."""

    conversion: Conversion
    index: int


class ExportedWeights(AbstractTensors):
    """The tensors of a model's files, made of its trained parameters and its buffers.

    Args:
        trained: the parameters by name.
        module: the torch module of the model.
        buffers: those that files have, by name.
    """

    def __init__(
        self,
        trained: AbstractTensors,
        module: PreTrainedModel,
        buffers: Mapping[str, np.ndarray],
    ) -> None:
        self._trained, self._module, self._buffers = trained, module, buffers
        self._made_by: dict[str, _Source] = {}
        specs: dict[str, ArraySpec] = {}
        names = sorted([*trained.specs, *self._buffers], key=dot_natural_key)
        found, renamings = reversed_conversions(names, module)
        for conversion in found:
            for index, (name, spec) in enumerate(self._results(conversion)):
                if conversion.converter is not None:
                    name = apply_renamings(name, renamings)
                specs[name], self._made_by[name] = spec, _Source(conversion, index)
        self.specs = specs
        if any(c.converter is not None for c in found):
            # A conversion holds what it reads, and what two operations make of that.
            self.copies = 3

    def plain_names(self) -> dict[str, str]:
        """The name in files of each parameter that is written as it is."""
        conversions = {name: x.conversion for name, x in self._made_by.items()}
        return {
            conversion.source: name
            for name, conversion in conversions.items()
            if conversion.converter is None
        }

    def block(self, name: str) -> tuple[int, ...]:
        conversion = self._made_by[name].conversion
        if conversion.converter is None:
            source = conversion.source
            if source in self._trained.specs:
                return self._trained.block(source)
        return tuple(max(1, size) for size in self.specs[name].shape)

    def read(self, name: str, box: Box) -> np.ndarray:
        conversion, index = self._made_by[name].conversion, self._made_by[name].index
        if conversion.converter is None:
            source = conversion.source
            if source in self._buffers:
                return np.ascontiguousarray(
                    self._buffers[source][tuple(slice(*edges) for edges in box)]
                )
            return self._trained.read(source, box)
        count = self._num_rows(conversion)
        row = None if count is None else index % count
        tensors = {
            pattern: [to_torch(self._rows(source, row)) for source in sources]
            for pattern, sources in conversion.sources.items()
        }
        done = list(conversion.run(tensors, self._module).values())
        array = to_numpy(done[index if count is None else index // count])
        return np.ascontiguousarray(array)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        return self._trained.holding(nbytes)

    def _results(self, conversion: Conversion) -> list[tuple[str, ArraySpec]]:
        if conversion.converter is None:
            return [(conversion.name, self._spec(conversion.source))]
        tensors = {
            pattern: [meta_tensor(self._spec(source)) for source in sources]
            for pattern, sources in conversion.sources.items()
        }
        done = conversion.run(tensors, self._module)
        return [(name, spec_of(tensor)) for name, tensor in done.items()]

    def _num_rows(self, conversion: Conversion) -> int | None:
        """The number of rows that a conversion takes apart; None if it takes none."""
        assert conversion.converter is not None
        last = conversion.converter.operations[-1]
        if not isinstance(last, SplitModulelist) or last.dim != 0:
            return None
        others = conversion.converter.operations[:-1]
        if any(0 in dims(operation) for operation in others):
            return None
        return self._spec(next(iter(conversion.sources.values()))[0]).shape[0]

    def _rows(self, source: str, row: int | None) -> np.ndarray:
        shape = self._spec(source).shape
        first = (0, shape[0]) if row is None else (row, row + 1)
        box = (first, *((0, size) for size in shape[1:]))
        if source in self._buffers:
            return self._buffers[source][slice(*first)]
        return np.array(self._trained.read(source, box))

    def _spec(self, source: str) -> ArraySpec:
        if source in self._trained.specs:
            return self._trained.specs[source]
        buffer = self._buffers[source]
        return ArraySpec(buffer.shape, buffer.dtype.name, buffer.dtype.itemsize)


def reversed_conversions(
    names: list[str], module: PreTrainedModel
) -> tuple[list[Conversion], list[WeightRenaming]]:
    """How weights become the tensors of files; and renamings of a conversion's results.

    This is the order of `transformers.core_model_loading.revert_weight_conversion`.
    """
    mapping = get_model_conversion_mapping(module, add_legacy=False)
    mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    backward = [entry.reverse_transform() for entry in reversed(mapping)]
    renamings = [entry for entry in backward if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in backward if isinstance(entry, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    sources: dict[str, dict[str, list[str]]] = {}
    by_name: dict[str, WeightConverter | None] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
        by_name[target] = None if pattern is None else by_pattern[pattern]
        sources.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    found = [Conversion(name, by_name[name], parts) for name, parts in sources.items()]
    return found, renamings
