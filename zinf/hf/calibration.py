"""What `zinf quantize` and `zinf prune` see of some texts: rows of tokens, and sums.

GPTQ and AWQ need the inputs of each linear layer. They are those of the model as it is,
before any layer is rounded, so one pass over the rows is enough: the model streams
through the device, and the sum over the inputs of each layer rests on the tiers like
the gradients of training. Layers that are distilled see the rows again and again.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import numpy as np
import optax
import torch

from zinf.adapt import Adapted
from zinf.adapt.choose import module_of
from zinf.adapt.contraction import Found
from zinf.adapt.record import contractions_of, is_matrix, recording
from zinf.core.config import Config
from zinf.core.config.precision import BF16, FP16, DataTypes
from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.sources import EngineTensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.hf.engine import TRACED_TOKENS, ModelEngine, engine_of
from zinf.hf.exported import ExportedWeights
from zinf.hf.model import Model
from zinf.hf.samples import Tokenizing

# Rows of a step, which all pass a layer before the next one is fetched.
STEP_ROWS = 16
# Longer than any text: lines are cut into rows, and none is too long.
NO_LIMIT = 2**62
WEIGHT = ".weight"
# What the loss is traced with: which weights it multiplies does not depend on it.
EXAMPLE = {"input_ids": np.zeros((1, TRACED_TOKENS), np.int32)}
Say = Callable[[str], None]


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
        plain: the name in files of each parameter that is written as it is.
    """

    found: Found
    paths: tuple[str, ...]
    left_out: tuple[str, ...]
    ignored: tuple[str, ...]
    plain: Mapping[str, str]


def choose(model: Model, exported: ExportedWeights, group_size: int) -> Choice:
    """The weights of plain linear layers, whose inputs are whole groups.

    Raises:
        ValueError: there is none, or the group does not divide the inputs of one.
    """
    found = contractions_of(model.running_loss, model.zeros, batch=EXAMPLE)
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
    return Choice(found, paths, left_out, ignored, names)


@contextmanager
def sums_over_inputs(
    model: Model,
    choice: Choice,
    rows: np.ndarray,
    config: ConfigSource,
    say: Say = lambda text: None,
) -> Generator[AbstractTensors, None, None]:
    """The sums over the inputs of the chosen layers, "adapter/PATH/gram"."""
    adapted = recording(model.running_loss, model.zeros, choice.found, choice.paths)
    batches = batches_of(rows)
    with calibrator(model, adapted, optax.sgd(-1.0), batches[0], config) as engine:
        seen = 0
        for batch in batches:
            engine.step(batch)
            seen += len(batch["input_ids"])
            say(f"{seen:,} of {len(batches) * len(batch['input_ids']):,} rows seen")
        yield EngineTensors(engine)


def batches_of(rows: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Rows as batches of one shape; fewer rows than there are batches are left out."""
    num_batches = -(-len(rows) // STEP_ROWS)
    count = len(rows) // num_batches
    return [
        {"input_ids": rows[i * count : (i + 1) * count]} for i in range(num_batches)
    ]


def calibrator(
    model: Model,
    adapted: Adapted,
    tx: optax.GradientTransformation,
    batch: Mapping[str, np.ndarray],
    config: ConfigSource,
    *,
    has_aux: bool = False,
) -> ModelEngine:
    """An engine that trains arrays beside the frozen weights of a model's files.

    All rows of a batch pass a layer before the next layer is fetched.

    Args:
        config: see `zinf.hf.quantize`.
        has_aux: the loss returns `(loss, aux)`.
    """
    rows = len(batch["input_ids"])
    changed = {
        "frozen": adapted.frozen,
        "gradient_accumulation_steps": rows // gcd(rows, jax.device_count()),
        # The arrays are in float32, and weights in the precision of the files.
        "bf16": BF16(),
        "fp16": FP16(),
        "data_types": DataTypes(),
    }
    run = Config.load(config).without_training().model_copy(update=changed)
    loss = model.running_loss
    return engine_of(model, adapted, tx, run, loss=loss, has_aux=has_aux, batch=batch)
