"""`zinf.hf.quantize`: a published model in 4 or 8 bits, as compressed-tensors keeps it.

The model streams through the device once, where a method sees texts; lkd trains it so.
Then the layers are rounded one at a time, on the CPU.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.folder import check_target
from zinf.core.interchange.names import listed, match
from zinf.core.interchange.safetensors_export import MAX_SHARD_BYTES, export_safetensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.chunk import chunk_shape
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.calibration import Say, choose
from zinf.hf.card import card_of
from zinf.hf.comparison import check_class
from zinf.hf.distilling import Distilling
from zinf.hf.export import METADATA, save_small_files
from zinf.hf.exported import ExportedWeights
from zinf.hf.model import Model
from zinf.hf.module import read_quantization
from zinf.hf.quantized.compressed_tensors import parts_of, section_of
from zinf.hf.rounders import METHODS, SEEING, Weights, rounding

BITS = (4, 8)


def quantize(
    model: Model,
    output: Path | str,
    rows: np.ndarray | None = None,
    config: ConfigSource = None,
    *,
    bits: int = 4,
    method: Literal["gptq", "awq", "lkd", "rtn"] = "gptq",
    group_size: int = 128,
    distilling: Distilling | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    say: Say = lambda text: None,
) -> None:
    """Write a model whose linear layers have weights of few bits.

    The folder is one of compressed-tensors (`pack-quantized`): symmetric integers with
    a scale for each group of inputs. zinf and transformers read it. Embeddings, output
    heads, routers, and what is no plain linear layer (stacked experts, convolutions)
    stay as they are, and `say` is told their names.

    Args:
        output: absent or empty. It appears only when it is complete.
        rows: tokens whose inputs the method sees, int32 (samples, tokens); see
            `calibration_rows`. None for rtn.
        config: budgets, folders and tiers, as for `open_model`.
        bits: 4 or 8.
        method: gptq changes the outputs of a layer least; awq scales inputs by their
            size, where a norm or the layer before takes the inverse, and cuts off the
            largest weights of a group; lkd trains the weights of each layer so that
            its outputs change least; rtn rounds each number to the nearest.
        group_size: inputs that share a scale. It divides the inputs of each layer.
        distilling: how lkd trains; None: with the defaults.
        max_shard_bytes: largest sum of tensor bytes in a file.
        say: gets lines about progress.

    Raises:
        ValueError: an argument is wrong, the model is quantized or has an adapter, or
            a layer has inputs that the method cannot use.
        FileExistsError, StorageError: see `zinf.interchange.export_safetensors`.
        InfeasibleError: the budgets have no room for the weights and the sums.
    """
    output = Path(output)
    check_quantizing(
        model, bits, method, output, has_rows=rows is not None, distilling=distilling
    )
    check_class(model)
    model.read_buffers()
    files, weights = model.open_weights()
    with files, _folder_beside(output) as spool:
        match(model.specs, weights.specs, {n: n for n in model.specs}, model.terms)
        parameters = _Chosen(weights, list(model.specs))
        exported = ExportedWeights(parameters, model.module, model.persistent_buffers())
        choice = choose(model, exported, group_size)
        if choice.left_out:
            say(f"left as they are: {listed(choice.left_out)}")
        names, parts = choice.plain, {}
        joined = [path for path in model.specs if path not in names]
        if joined:
            say(
                f"the files have several tensors for each of {listed(joined)}; "
                "transformers (5.24) does not load these plain beside packed ones. "
                "zinf does."
            )
        given = Weights(parameters, bits, group_size)
        how = distilling or Distilling()
        with rounding(method, model, choice, given, rows, config, how, say) as rounder:
            for number, path in enumerate(choice.paths):
                packed = parts_of(rounder.round(path), given.grid(path))
                parts[names[path]] = {
                    end: _spooled(array, spool / f"{number}{end}")
                    for end, array in packed.items()
                }
            for path, array in rounder.changed().items():
                parts[names[path]] = {"": array}
        section = section_of(bits, group_size, choice.ignored)
        seen = "" if rows is None else f", over {rows.size:,} tokens of texts"
        more = f"Linear layers are in {bits} bits, by {method}, with a scale for each "
        more += f"{group_size} inputs (compressed-tensors){seen}."
        card = card_of(model.name, adapter=False, more=more)
        stored = model.stored_dtype or model.dtype
        export_safetensors(
            _Quantized(exported, parts),
            output,
            max_shard_bytes=max_shard_bytes,
            names=lambda name: name,
            metadata=METADATA,
            beside=lambda folder: save_small_files(
                model, folder, stored, section, card=card
            ),
        )


def check_quantizing(
    model: Model,
    bits: int,
    method: str,
    output: Path,
    *,
    has_rows: bool,
    distilling: Distilling | None = None,
) -> None:
    """Refuse what cannot be quantized, before any line or weight is read.

    Raises:
        ValueError, FileExistsError: see `quantize`.
    """
    check_target(output, 0)
    if bits not in BITS:
        raise ValueError(
            f"Weights of {bits} bits are asked for, and zinf writes those of 4 or 8 "
            "(--bits)."
        )
    if method not in METHODS:
        raise ValueError(
            f"The method is {method!r}; it must be {' or '.join(METHODS)} (--method)."
        )
    if method in SEEING and not has_rows:
        raise ValueError(
            f"{method} rounds weights by the inputs that they see, and no texts are "
            "given. Name a file of texts (--data FILE), or round to the nearest "
            "(--method rtn)."
        )
    if method not in SEEING and has_rows:
        raise ValueError(
            f"{method} rounds each number to the nearest and sees no texts. Leave "
            f"--data out, or take --method {' or '.join(SEEING)}."
        )
    if method != "lkd" and distilling is not None:
        raise ValueError(
            f"{method} trains nothing, and steps or a learning rate are given. Leave "
            "--lkd-steps and --lkd-learning-rate out, or take --method lkd."
        )
    if model.adapter is not None:
        raise ValueError(
            f"{model.adapter.folder} has an adapter, which is not quantized with its "
            "base. Write the merged model first (zinf checkpoint export --merge, or "
            "merge_and_unload in PEFT)."
        )
    section = read_quantization(model.folder)
    if section is not None:
        kind = section.get("quant_method", "an unknown method")
        raise ValueError(
            f"{model.name} is quantized already ({kind}), and would lose precision "
            "twice. Name the model in bfloat16 or float32 that it was made of."
        )


@contextmanager
def _folder_beside(output: Path) -> Generator[Path, None, None]:
    """A folder on the drive of the output, removed at the end, for rounded weights."""
    with TemporaryDirectory(
        prefix=f".{output.name}.codes.", dir=output.parent
    ) as folder:
        yield Path(folder)


def _spooled(array: np.ndarray, path: Path) -> np.ndarray:
    """The array in a file, mapped into memory."""
    array.tofile(path)
    return np.memmap(path, array.dtype, "r", shape=array.shape)


class _Chosen(AbstractTensors):
    """Some of the tensors."""

    def __init__(self, tensors: AbstractTensors, names: Sequence[str]) -> None:
        self._tensors = tensors
        self.specs = {name: tensors.specs[name] for name in names}

    def block(self, name: str) -> tuple[int, ...]:
        return self._tensors.block(name)

    def copies_of(self, name: str) -> int:
        return self._tensors.copies_of(name)

    def read(self, name: str, box: Box) -> np.ndarray:
        return self._tensors.read(name, box)


class _Quantized(AbstractTensors):
    """The tensors of a model's files, with codes and scales in place of some.

    Args:
        parts: for each tensor that is replaced, arrays by what their names end in.
    """

    def __init__(
        self,
        plain: AbstractTensors,
        parts: Mapping[str, Mapping[str, np.ndarray]],
    ) -> None:
        self._plain, self._arrays, self.copies = plain, {}, plain.copies
        specs: dict[str, ArraySpec] = {}
        for name, spec in plain.specs.items():
            if name not in parts:
                specs[name] = spec
            for end, array in parts.get(name, {}).items():
                kind = array.dtype
                specs[f"{name}{end}"] = ArraySpec(array.shape, kind.name, kind.itemsize)
                self._arrays[f"{name}{end}"] = array
        self.specs = specs

    def block(self, name: str) -> tuple[int, ...]:
        if name in self._arrays:
            return chunk_shape(self.specs[name])
        return self._plain.block(name)

    def copies_of(self, name: str) -> int:
        return 1 if name in self._arrays else self._plain.copies_of(name)

    def read(self, name: str, box: Box) -> np.ndarray:
        if name not in self._arrays:
            return self._plain.read(name, box)
        return np.array(self._arrays[name][tuple(slice(*edges) for edges in box)])
