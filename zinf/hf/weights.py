"""Reads the weights of a model from its files, under whatever names they have there.

The names in a file are often not those of the parameters: Mixtral's files have a tensor
per expert, and the model one for all. `transformers` says what becomes of each tensor
of a file: it renames it, or converts several into one, or one into several. Its own
operations run here too, for one parameter at a time, or for some experts of one.
"""

import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from zinf.core.interchange.tensors import AbstractTensors, ahead
from zinf.core.memory import aligned_empty
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.codes import Codes
from zinf.hf.quantized.packed import Dequantized

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Two tensors in one place are compared in parts of about so many bytes.
COMPARED_BYTES = 64 << 20
# The operations, with their dims, that put experts into one tensor, and then the two
# matrices of each.
JOINING = [(MergeModulelist, 0), (Concatenate, 1)]
# Rows of a stack of experts that are read at once, each from tensors of its own.
ROWS_AHEAD = 4


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor in the memory of an array."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """An array in the memory of a tensor, which is made contiguous first."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def spec_of(tensor: torch.Tensor) -> ArraySpec:
    """The shape and dtype of a tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    return ArraySpec(tuple(tensor.shape), name, tensor.dtype.itemsize)


def meta_tensor(spec: ArraySpec) -> torch.Tensor:
    """A tensor with a shape and dtype, and without values."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


@dataclass(frozen=True)
class Conversion:
    """How tensors of files become weights, or weights tensors of files.

    Attributes:
        name: the name that the results are derived from.
        converter: the operations; None if the tensor only has another name.
        sources: names of the tensors, by the pattern of the converter they match.
    """

    name: str
    converter: WeightConverter | None
    sources: Mapping[str, Sequence[str]]

    @property
    def is_by_row(self) -> bool:
        """Whether row i of the result is made of the i-th tensor of each pattern."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        named = [dim for op in others for dim in dims(op)]
        return isinstance(first, MergeModulelist) and first.dim == 0 and 0 not in named

    @property
    def joined(self) -> list[str]:
        """The tensors that are the result if put one after the other; empty: none.

        Such are one tensor, and experts one by one, each maybe of two matrices.
        """
        if self.converter is None:
            return [self.source]
        done = [(type(x), *dims(x)) for x in self.converter.operations]
        if done not in (JOINING[:1], JOINING):
            return []
        order = [p for p in self.converter.source_patterns if p in self.sources]
        rows = zip(*(self.sources[pattern] for pattern in order), strict=True)
        return [tensor for row in rows for tensor in row]

    @property
    def source(self) -> str:
        """The only tensor that it is made of."""
        ((source,),) = self.sources.values()
        return source

    def run(
        self,
        tensors: Mapping[str, Sequence[torch.Tensor]],
        model: PreTrainedModel,
    ) -> dict[str, torch.Tensor]:
        """The results by name, of the tensors of each pattern."""
        assert self.converter is not None
        converter = deepcopy(self.converter)
        for pattern, found in tensors.items():
            for tensor in found:
                converter.add_tensor(self.name, self.name, pattern, tensor)
            if self.is_by_row and len(found) == 1:
                # One row is a stack already: torch would copy it.
                converter.collected_tensors[pattern] = found[0][None]
        with one_thread():
            done = converter.convert(self.name, model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in done.items()
        }


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """In the `with` block, torch computes in this thread alone.

    Conversions copy some MB, and on a busy machine threads of torch wait for each other
    longer than that takes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dims(operation: Any) -> list[int]:
    """The dims that an operation names; 0 if it names none, as any may be meant."""
    found = [getattr(operation, name, None) for name in ("dim", "dim0", "dim1")]
    return [dim for dim in found if dim is not None] or [0]


class AbstractWeights(AbstractTensors):
    """The parameters and persistent buffers of a model, read from files.

    Attributes:
        unused: tensors of the files that the model has no place for, and that it does
            not expect there.
        new: parameters that the files lack, and that have initial values.
        codes: those that the files have in few bits, which can be kept so.
    """

    unused: Collection[str]
    new: Collection[str] = ()
    codes: Codes

    def whole(self, name: str) -> np.ndarray:
        """All of a parameter or buffer."""
        return self.read(name, tuple((0, size) for size in self.specs[name].shape))


class StoredWeights(AbstractWeights):
    """The weights of a model in its files.

    Args:
        parted: names of parameters that are one weight in the files, under any of them.
    """

    def __init__(
        self,
        files: Dequantized,
        model: PreTrainedModel,
        parted: Iterable[Sequence[str]] = (),
    ) -> None:
        self._files, self._model = files, model
        self._made_by: dict[str, Conversion] = {}
        found, unused = conversions(list(files.specs), model)
        self.unused = unused
        specs: dict[str, ArraySpec] = {}
        self._first = first = first_names(model)
        # What is tied may be in a file under each of its names.
        again: list[tuple[str, Conversion]] = []
        for conversion in found:
            for name, spec in self._results(conversion).items():
                name = first.get(name, name)
                if name not in specs:
                    specs[name], self._made_by[name] = spec, conversion
                else:
                    again.append((name, conversion))
        for names in parted:
            source = next((name for name in names if name in specs), None)
            for name in names:
                if source is not None and name not in specs:
                    specs[name], self._made_by[name] = (
                        specs[source],
                        self._made_by[source],
                    )
        self.specs = specs
        joined = {name: made.joined for name, made in self._made_by.items()}
        self.codes = Codes(
            {
                name: [(files.files, files.made[tensor]) for tensor in tensors]
                for name, tensors in joined.items()
                if tensors and all(tensor in files.made for tensor in tensors)
            }
        )
        for name, conversion in again:
            self._check_tied(name, conversion)

    def _check_tied(self, name: str, other: Conversion) -> None:
        """Refuse a second tensor for a tied parameter if its content differs."""
        conversion = self._made_by[name]
        if conversion.converter is not None or other.converter is not None:
            return
        sources = conversion.source, other.source
        one, two = (self._files.specs[source] for source in sources)
        if (one.shape, one.dtype) == (two.shape, two.dtype):
            height = max(1, COMPARED_BYTES * one.shape[0] // max(1, one.nbytes))
            boxes = (
                ((i, min(i + height, one.shape[0])), *((0, n) for n in one.shape[1:]))
                for i in range(0, one.shape[0], height)
            )
            if all(self._is_same(sources, box) for box in boxes):
                return
        raise ValueError(
            f"The files have {sources[0]!r} and {sources[1]!r}, which differ, and "
            "config.json says that the two are one (tie_word_embeddings). Set "
            "tie_word_embeddings to false there to keep both, as transformers does; or "
            "remove the wrong one from the files."
        )

    def _is_same(self, sources: tuple[str, str], box: Box) -> bool:
        one, two = (self._files.read(source, box) for source in sources)
        return one.tobytes() == two.tobytes()

    def copies_of(self, name: str) -> int:
        conversion = self._made_by[name]
        sources = [s for found in conversion.sources.values() for s in found]
        copies = max(map(self._files.copies_of, sources))
        # A conversion holds what it reads, and what two operations make of that.
        return copies if conversion.converter is None else copies + 2

    def block(self, name: str) -> tuple[int, ...]:
        conversion, shape = self._made_by[name], self.specs[name].shape
        if conversion.converter is None:
            return self._files.block(conversion.source)
        if not shape:
            return ()
        return (1 if conversion.is_by_row else shape[0], *shape[1:])

    def read(self, name: str, box: Box) -> np.ndarray:
        conversion = self._made_by[name]
        if conversion.converter is None:
            return self._files.read(conversion.source, box)
        if not conversion.is_by_row:
            array = self._converted(name, self._tensors(conversion, slice(None)))
            return array[slice(*box[0])] if box else array
        low, high = box[0]
        if high - low == 1:
            return self._converted(name, self._tensors(conversion, slice(low, high)))
        # Converting all rows at once would hold the part three times.
        spec = self.specs[name]
        part = aligned_empty((high - low, *spec.shape[1:]), numpy_dtype(spec.dtype))
        rows = (slice(row, row + 1) for row in range(low, high))
        read = partial(self._tensors, conversion)
        for row, tensors in enumerate(ahead(read, rows, ROWS_AHEAD)):
            part[row] = self._converted(name, tensors)[0]
        return part

    def _tensors(
        self, conversion: Conversion, rows: slice
    ) -> dict[str, list[torch.Tensor]]:
        """The tensors of some rows by the pattern that they match."""
        return {
            pattern: [to_torch(self._whole(source)) for source in sources[rows]]
            for pattern, sources in conversion.sources.items()
        }

    def _converted(
        self, name: str, tensors: Mapping[str, Sequence[torch.Tensor]]
    ) -> np.ndarray:
        done = self._made_by[name].run(tensors, self._model)
        result = next(x for n, x in done.items() if self._first.get(n, n) == name)
        return to_numpy(result)

    def _whole(self, source: str) -> np.ndarray:
        shape = self._files.specs[source].shape
        return self._files.read(source, tuple((0, size) for size in shape))

    def _results(self, conversion: Conversion) -> dict[str, ArraySpec]:
        specs = self._files.specs
        if conversion.converter is None:
            return {conversion.name: specs[conversion.source]}
        tensors = {
            pattern: [meta_tensor(specs[source]) for source in sources]
            for pattern, sources in conversion.sources.items()
        }
        try:
            done = conversion.run(tensors, self._model)
        except (RuntimeError, ValueError, IndexError) as error:
            sources = [s for found in conversion.sources.values() for s in found]
            shapes = {f"{s} {list(specs[s].shape)}" for s in sources[:4]}
            raise ValueError(
                f"{conversion.name!r} cannot be made of {', '.join(sorted(shapes))}: "
                f"{error}. Get the files again, or check that config.json belongs to "
                "them."
            ) from error
        return {name: spec_of(tensor) for name, tensor in done.items()}


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """The name under which a tied parameter is trained, by each of its names."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def conversions(
    names: Sequence[str], model: PreTrainedModel
) -> tuple[list[Conversion], tuple[str, ...]]:
    """Conversions from a model's files to its weights, and names that are not used."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    wanted = model.state_dict()
    sources: dict[str, dict[str, list[str]]] = {}
    by_name: dict[str, WeightConverter | None] = {}
    unused = []
    for source in sorted(names, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(
            source, renamings, converters, prefix, wanted
        )
        if target not in wanted and source in wanted:
            target, pattern = source, None
        if target not in wanted:
            unused.append(source)
            continue
        by_name[target] = by_pattern[pattern] if pattern is not None else None
        sources.setdefault(target, {}).setdefault(pattern or source, []).append(source)
    found = [Conversion(name, by_name[name], parts) for name, parts in sources.items()]
    expected = model._keys_to_ignore_on_load_unexpected or ()
    expected = [*expected, r"rotary_emb\.inv_freq"]
    left = [n for n in unused if not any(re.search(p, n) for p in expected)]
    return found, tuple(left)


def check_dtypes(specs: Mapping[str, ArraySpec]) -> None:
    """Refuse tensors that are no plain numbers.

    Raises:
        NotImplementedError: some are in 8 bits, as quantized weights are.
    """
    for name, spec in specs.items():
        if numpy_dtype(spec.dtype).itemsize == 1 and spec.dtype != "bool":
            raise NotImplementedError(
                f"The tensor {name!r} is {spec.dtype}: it is quantized, and the files "
                "have no scales for it that zinf knows (NAME_scale_inv of fp8). Use "
                "the checkpoint in bfloat16, or dequantize this one in transformers "
                "and save it."
            )
