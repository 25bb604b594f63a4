"""`zinf.hf.quantize`: a published model in 4 or 8 bits, as compressed-tensors keeps it.

GPTQ needs the inputs of each linear layer. They are those of the model as it is, before
any layer is rounded, so one pass over the samples is enough: the model streams through
the device, and the sum over the inputs of each layer rests on the tiers like the
gradients of training. Then the layers are rounded one at a time, on the CPU.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import numpy as np
import optax
import torch

from zinf.adapt.adapted import ADAPTER
from zinf.adapt.choose import module_of
from zinf.adapt.contraction import Found
from zinf.adapt.record import GRAM, contractions_of, is_matrix, recording
from zinf.core.config import Config
from zinf.core.config.precision import BF16, FP16, DataTypes
from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.folder import check_target
from zinf.core.interchange.names import listed, match
from zinf.core.interchange.safetensors_export import MAX_SHARD_BYTES, export_safetensors
from zinf.core.interchange.sources import EngineTensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.chunk import chunk_shape
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.card import card_of
from zinf.hf.comparison import check_class
from zinf.hf.engine import TRACED_TOKENS, engine_of
from zinf.hf.export import METADATA, ExportedWeights, save_small_files
from zinf.hf.model import Model
from zinf.hf.module import read_quantization
from zinf.hf.quantized.compressed_tensors import parts_of, section_of
from zinf.hf.quantized.packed import read_floats, read_whole
from zinf.hf.quantized.rounding import DAMPING, Grid, Rounded, gptq, nearest
from zinf.hf.samples import Tokenizing

BITS = (4, 8)
METHODS = ("gptq", "rtn")
# Rows of a step, which all pass a layer before the next one is fetched.
STEP_ROWS = 16
# Longer than any text: lines are cut into rows, and none is too long.
NO_LIMIT = 2**62
WEIGHT = ".weight"
Say = Callable[[str], None]


def quantize(
    model: Model,
    output: Path | str,
    rows: np.ndarray | None = None,
    config: ConfigSource = None,
    *,
    bits: int = 4,
    method: Literal["gptq", "rtn"] = "gptq",
    group_size: int = 128,
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
        rows: tokens whose inputs gptq sees, int32 (samples, tokens); see
            `calibration_rows`. None for rtn, which rounds each number to the nearest.
        config: budgets, folders and tiers, as for `open_model`.
        bits: 4 or 8.
        group_size: inputs that share a scale. It divides the inputs of each layer.
        max_shard_bytes: largest sum of tensor bytes in a file.
        say: gets lines about progress.

    Raises:
        ValueError: an argument is wrong, the model is quantized or has an adapter, or
            a layer has inputs that gptq cannot use.
        FileExistsError, StorageError: see `zinf.interchange.export_safetensors`.
        InfeasibleError: the budgets have no room for the weights and the sums.
    """
    output = Path(output)
    check_quantizing(model, bits, method, output, has_rows=rows is not None)
    check_class(model)
    model.read_buffers()
    files, weights = model.open_weights()
    with files, _folder_beside(output) as spool:
        match(model.specs, weights.specs, {n: n for n in model.specs}, model.terms)
        parameters = _Chosen(weights, list(model.specs))
        exported = ExportedWeights(parameters, model)
        choice = choose(model, exported, group_size)
        if choice.left_out:
            say(f"left as they are: {listed(choice.left_out)}")
        names, parts = exported.plain_names(), {}
        joined = [path for path in model.specs if path not in names]
        if joined:
            say(
                f"the files have several tensors for each of {listed(joined)}; "
                "transformers (5.24) does not load these plain beside packed ones. "
                "zinf does."
            )
        with sums_over_inputs(model, choice, rows, config, say) as sums:
            for number, path in enumerate(choice.paths):
                dtype = parameters.specs[path].dtype
                rounded = _rounded(
                    path, parameters, sums, Grid(bits, group_size, dtype), say
                )
                parts[names[path]] = {
                    end: _spooled(array, spool / f"{number}{end}")
                    for end, array in parts_of(rounded, bits, dtype).items()
                }
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
    model: Model, bits: int, method: str, output: Path, *, has_rows: bool
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
    if method == "gptq" and not has_rows:
        raise ValueError(
            "gptq rounds weights by the inputs that they see, and no texts are given. "
            "Name a file of texts (--data FILE), or round to the nearest (--method "
            "rtn)."
        )
    if method == "rtn" and has_rows:
        raise ValueError(
            "rtn rounds each number to the nearest and sees no texts. Leave --data "
            "out, or take --method gptq."
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


def calibration_rows(
    model: Model, records: Iterable[tuple[Any, str]], *, samples: int, length: int
) -> np.ndarray:
    """The first tokens of some lines, one text after the other, cut into full rows.

    Full rows count alike in the sums, whatever the microbatches are.

    Args:
        records: lines as for fine-tuning, and where each is; see `zinf.hf.records`.
        samples: most rows.
        length: tokens of a row.

    Returns:
        int32 (rows, length).

    Raises:
        ValueError: a line is wrong, the lines have no full row, or the rows are longer
            than the model was made for.
    """
    if model.max_length is not None and length > model.max_length:
        raise ValueError(
            f"The rows have {length:,} tokens, and {model.name} was made for "
            f"{model.max_length:,} (max_position_embeddings). Lower --sequence-length."
        )
    how = Tokenizing.of(
        model, sequence_length=NO_LIMIT, too_long="error", completion_only=False
    )
    tokens: list[int] = []
    for line, where in records:
        if len(tokens) >= samples * length:
            break
        for ids, _ in how.read(line, where).samples:
            tokens.extend(ids)
    count = min(samples, len(tokens) // length)
    if count == 0:
        raise ValueError(
            f"The lines have {len(tokens):,} tokens, and a row takes {length:,}. Give "
            "more text, or lower --sequence-length."
        )
    return np.array(tokens[: count * length], np.int32).reshape(count, length)


@dataclass(frozen=True)
class Choice:
    """Which weights are rounded.

    Attributes:
        found: what the loss does with the parameters.
        paths: names of the parameters that are.
        left_out: what else is multiplied by activations, by the name of its module:
            heads, routers, experts, convolutions.
        ignored: those of `left_out` that are `torch.nn.Linear`.
    """

    found: Found
    paths: tuple[str, ...]
    left_out: tuple[str, ...]
    ignored: tuple[str, ...]


def choose(model: Model, exported: ExportedWeights, group_size: int) -> Choice:
    """The weights of plain linear layers, whose inputs are whole groups.

    Raises:
        ValueError: there is none, or the group does not divide the inputs of one.
    """
    batch = {"input_ids": np.zeros((1, TRACED_TOKENS), np.int32)}
    found = contractions_of(model.running_loss, model.zeros, batch=batch)
    names = exported.plain_names()
    linear = {
        f"{name}{WEIGHT}": name
        for name, module in model.module.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    paths = tuple(
        path
        for path in found.linear
        if path in linear and path in names and is_matrix(found.contractions[path])
    )
    if not paths:
        raise ValueError(
            f"{model.name} has no weight of a plain linear layer (torch.nn.Linear) to "
            "quantize."
        )
    inputs = {path: model.specs[path].shape[1] for path in paths}
    for path, count in inputs.items():
        if group_size < 1 or count % group_size:
            raise ValueError(
                f"{path} has {count:,} inputs, which groups of {group_size:,} do not "
                f"divide. Set --group-size to {gcd(*inputs.values()):,}, or to "
                "another divisor of the inputs of all layers."
            )
    ignored = tuple(name for path, name in linear.items() if path not in inputs)
    others = [module_of(p) for p in found.contractions if p not in inputs]
    left_out = tuple(dict.fromkeys([*ignored, *others]))
    return Choice(found, paths, left_out, ignored)


@contextmanager
def sums_over_inputs(
    model: Model,
    choice: Choice,
    rows: np.ndarray | None,
    config: ConfigSource,
    say: Say = lambda text: None,
) -> Generator[AbstractTensors | None, None, None]:
    """The sums over the inputs of the chosen layers, "adapter/PATH/gram"."""
    if rows is None:
        yield None
        return
    loss = model.running_loss
    adapted = recording(loss, model.zeros, choice.found, choice.paths)
    # All steps have one shape; fewer rows than there are steps are left out.
    num_steps = -(-len(rows) // STEP_ROWS)
    step_rows = len(rows) // num_steps
    devices = gcd(step_rows, jax.device_count())
    changed = {
        "frozen": adapted.frozen,
        "gradient_accumulation_steps": step_rows // devices,
        # The sums are in float32, and weights in the precision of the files.
        "bf16": BF16(),
        "fp16": FP16(),
        "data_types": DataTypes(),
    }
    run = Config.load(config).without_training().model_copy(update=changed)
    batches = [
        {"input_ids": rows[i * step_rows : (i + 1) * step_rows]}
        for i in range(num_steps)
    ]
    with engine_of(
        model, adapted, optax.sgd(-1.0), run, loss=loss, batch=batches[0]
    ) as engine:
        for number, batch in enumerate(batches, 1):
            engine.step(batch)
            say(f"{number * step_rows:,} of {num_steps * step_rows:,} rows seen")
        yield EngineTensors(engine)


def _rounded(
    path: str,
    weights: AbstractTensors,
    sums: AbstractTensors | None,
    grid: Grid,
    say: Say,
) -> Rounded:
    """A weight, rounded by gptq if there are sums over inputs, else to the nearest."""
    weight = read_floats(weights, path)
    if sums is None:
        return nearest(weight, grid)
    try:
        rounded = gptq(weight, read_whole(sums, f"{ADAPTER}/{path}/{GRAM}"), grid)
    except ValueError as error:
        raise ValueError(
            f"gptq cannot round {path}: {error}. Give more texts or other ones, or "
            "take --method rtn."
        ) from error
    more = ""
    if rounded.damping > DAMPING:
        more = f", with {rounded.damping:g} of the mean diagonal added, not {DAMPING:g}"
    say(f"{path} is rounded{more}")
    return rounded


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
