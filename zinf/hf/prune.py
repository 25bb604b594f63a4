"""`zinf.hf.prune`: a smaller model of the weights of a larger one.

Experts are kept by how often the tokens of some texts chose them, as many in each layer
(Z-code, https://arxiv.org/abs/2109.10465). The routers lose the rows of the others, so
a router's softmax is that of the whole model with the scores of the others at -inf. Or
layers are kept by number, as a student begins with layers of its teacher
(https://arxiv.org/abs/2201.05596).
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.folder import check_target
from zinf.core.interchange.names import listed, match
from zinf.core.interchange.safetensors_export import MAX_SHARD_BYTES, export_safetensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.card import card_of
from zinf.hf.dropping import layers_of
from zinf.hf.engine import open_model
from zinf.hf.experts import recorded, routed
from zinf.hf.export import METADATA, save_small_files
from zinf.hf.exported import ExportedWeights
from zinf.hf.model import Batch, Model, Params

# Keys of a configuration that may say how many routed experts a layer has.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Keys that say how many experts a token has, and in how many groups experts are.
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k")
GROUPS = "n_group"
LAYERS = "num_hidden_layers"
# Keys that say how many of the first layers have no experts.
DENSE = ("first_k_dense_replace", "num_dense_layers")
# Modules beside the experts that have a row for each of them.
ROUTERS = ("gate", "router")
# Rows of texts that all pass a layer before the next one is fetched.
STEP_ROWS = 16
# Experts of a layer, by the name of their module.
Kept = Mapping[str, np.ndarray]


def use_of_experts(
    model: Model, rows: np.ndarray, config: ConfigSource = None
) -> dict[str, np.ndarray]:
    """How often the tokens of some rows choose each expert.

    Args:
        rows: tokens, int32 (samples, tokens); see `calibration_rows`.
        config: budgets, folders and tiers, as for `open_model`.

    Returns:
        int64 (experts,) by the name of the module of a layer's experts.

    Raises:
        ValueError: the model has no routed experts that zinf knows.
    """
    sizes = experts_of(model)
    step = min(STEP_ROWS, len(rows))
    totals = {name: np.zeros(size, np.int64) for name, size in sizes.items()}

    def count(params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Choices of each row, int32 (rows, experts)."""
        with recorded() as choices:
            model.logits(params, batch)
        names = (name_of_module(model, module) for module, _ in choices)
        return {
            name: _counts(choice, len(batch["input_ids"]), sizes[name])
            for name, (_, choice) in zip(names, choices, strict=True)
        }

    with open_model(model, config, rows=1, length=rows.shape[1]) as engine:
        applied = engine.applied(count)
        # Steps have one shape; what is left over is a step of its own.
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            batch = {"input_ids": part}
            found = engine.apply(applied, batch, num_microbatches=len(part))
            for name, counts in found.items():
                totals[name] += np.asarray(counts, np.int64).sum(axis=0)
    return totals


def _counts(choice: jax.Array, rows: int, experts: int) -> jax.Array:
    by_row = choice.reshape(rows, -1)
    return jax.vmap(lambda row: jnp.bincount(row, length=experts))(by_row)


def experts_of(model: Model) -> dict[str, int]:
    """The numbers of routed experts, by the name of the module of a layer's experts.

    Raises:
        ValueError: the model has none that zinf knows.
    """
    found = routed(model.module)
    if not found:
        raise ValueError(
            f"{model.name} ({type(model.module).__name__}) has no routed experts that "
            "zinf prunes. Name a mixture of experts, or keep some layers (--layers)."
        )
    return found


def name_of_module(model: Model, module: torch.nn.Module) -> str:
    """The name of a module of any of the torch modules of a model."""
    for whole in model._modules.values():
        for name, each in whole.named_modules():
            if each is module:
                return name
    raise AssertionError("the module is of another model")


def most_used(use: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The experts of each layer that are used most, ascending; of equals the first."""
    return {
        name: np.sort(np.argsort(-counts, kind="stable")[:count])
        for name, counts in use.items()
    }


def prune_experts(
    model: Model,
    output: Path | str,
    kept: Kept,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a mixture with some of its experts, as many in each layer.

    Args:
        output: absent or empty. It appears only when it is complete.
        kept: experts of each layer, ascending, by the name of their module; see
            `most_used`.

    Raises:
        ValueError: layers keep different numbers, or fewer than a token chooses.
        NotImplementedError: experts are in groups, or the configuration does not say
            how many there are in a way that zinf knows.
    """
    counts = {len(numbers) for numbers in kept.values()}
    if len(counts) != 1:
        raise ValueError(
            f"Layers are to keep {listed(sorted(map(str, counts)))} experts, and "
            "config.json has one number for all. Keep as many in each."
        )
    (count,) = counts
    config = _with_experts(model, count)
    parts = {
        name: _Part(name, kept[owner])
        for owner in kept
        for name in _rows_by_expert(model, owner)
    }
    more = f"{count:,} experts of each layer are kept, those used most."
    named = {"more": more, "max_shard_bytes": max_shard_bytes}
    _write(model, config, parts, Path(output), **named)


def prune_layers(
    model: Model,
    output: Path | str,
    layers: Sequence[int],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model with some of its layers, in their order.

    Args:
        output: absent or empty. It appears only when it is complete.
        layers: their numbers, from 0, ascending.

    Raises:
        ValueError: they are not ascending, or the model has not so many.
        NotImplementedError: the other layers would not fit the configuration.
    """
    config = deepcopy(model.config)
    text = config.get_text_config()
    count, wanted = getattr(text, LAYERS), list(layers)
    if (
        not wanted
        or wanted != sorted({*wanted})
        or not 0 <= wanted[0] <= wanted[-1] < count
    ):
        raise ValueError(
            f"Layers {', '.join(map(str, wanted)) or 'none'} are to be kept, and "
            f"{model.name} has layers 0 to {count - 1}. Name some of them, ascending."
        )
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == count and "token" not in key:
            setattr(text, key, [value[i] for i in wanted])
    for key in DENSE:
        if isinstance(first := getattr(text, key, None), int):
            setattr(text, key, sum(layer < first for layer in wanted))
    setattr(text, LAYERS, len(wanted))
    try:
        stack = layers_of(model.module)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{type(model.module).__name__} has no list of its {count} layers, so zinf "
            "cannot keep some of them."
        ) from error
    stem = name_of_module(model, stack[0]).removesuffix("0")
    parts = {}
    for number, layer in enumerate(wanted):
        for name in _all_specs(model):
            old = f"{stem}{layer}."
            if name.startswith(old):
                new = f"{stem}{number}.{name.removeprefix(old)}"
                parts[new] = _Part(name)
    more = f"Layers {', '.join(map(str, wanted))} of {count} are kept."
    named = {"more": more, "max_shard_bytes": max_shard_bytes, "stem": stem}
    _write(model, config, parts, Path(output), **named)


@dataclass(frozen=True)
class _Part:
    """A tensor of the larger model, or some of its rows."""

    source: str
    rows: np.ndarray | None = None


def check_pruning(model: Model, count: int) -> None:
    """Refuse experts that cannot be pruned, before any text or weight is read.

    Raises:
        ValueError, NotImplementedError: see `prune_experts` and `experts_of`.
    """
    _with_experts(model, count)


def _with_experts(model: Model, count: int) -> Any:
    """The configuration of a model with fewer experts in each layer."""
    config = deepcopy(model.config)
    text, sizes = config.get_text_config(), experts_of(model)
    values = text.to_dict()
    keys = [key for key in COUNTS if values.get(key) in sizes.values()]
    if len({*sizes.values()}) != 1 or not keys:
        raise NotImplementedError(
            f"The configuration of {model.name} has none of {', '.join(COUNTS)} with "
            f"the number of experts of all layers ({listed(sorted(map(str, sizes)))}), "
            "so zinf cannot say that there are fewer."
        )
    if (values.get(GROUPS) or 1) > 1:
        raise NotImplementedError(
            f"The experts of {model.name} are in {values[GROUPS]} groups, of which a "
            "token chooses some, and those that are used most are not as many in each."
        )
    whole, chosen = values[keys[0]], [values.get(key) or 1 for key in CHOSEN]
    if not max(chosen) <= count <= whole:
        raise ValueError(
            f"{count} experts are to be kept; a layer of {model.name} has {whole}, and "
            f"a token chooses {max(chosen)}. Keep {max(chosen)} to {whole} (--experts)."
        )
    for key in keys:
        setattr(text, key, count)
    return config


def _all_specs(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters and persistent buffers."""
    buffers = {n: x.shape for n, x in model.persistent_buffers().items()}
    return {n: spec.shape for n, spec in model.specs.items()} | buffers


def _rows_by_expert(model: Model, owner: str) -> list[str]:
    """Tensors of a layer with a row for each expert: of experts and their router."""
    block, count = owner.rpartition(".")[0], experts_of(model)[owner]
    places = (owner, *(f"{block}.{name}" for name in ROUTERS))
    return [
        name
        for name, shape in _all_specs(model).items()
        if name.rpartition(".")[0].startswith(places) and shape[:1] == (count,)
    ]


def _write(
    model: Model,
    config: Any,
    parts: Mapping[str, _Part],
    output: Path,
    *,
    more: str,
    max_shard_bytes: int,
    stem: str = "",
) -> None:
    """Write the model of a configuration, made of parts of a larger one.

    Args:
        parts: of the larger one, by names here; other tensors are as they are there.
        stem: how names of layers begin, if `parts` are all that layers have.
    """
    check_target(output, 0)
    model.read_buffers()
    small = Model(model.name, model.folder, config, model.dtype)
    files, weights = model.open_weights()
    with files:
        match(model.specs, weights.specs, {n: n for n in model.specs}, model.terms)
        taken = {name: parts.get(name, _Part(name)) for name in _all_specs(small)}
        # What the layers of one model have and those of the other lack.
        of_layers = {n for n in taken if n.startswith(stem)}
        _check(model, small, taken, others=parts.keys() ^ of_layers if stem else ())
        buffers = model.persistent_buffers()
        small._stored_buffers = {
            name: buffers[part.source]
            if part.rows is None
            else buffers[part.source][part.rows]
            for name, part in taken.items()
            if part.source in buffers
        }
        chosen = {name: part for name, part in taken.items() if name in small.specs}
        stored = model.stored_dtype or model.dtype
        card = card_of(model.name, adapter=False, more=more)
        export_safetensors(
            ExportedWeights(
                _Taken(weights, chosen), small.module, small.persistent_buffers()
            ),
            output,
            max_shard_bytes=max_shard_bytes,
            names=lambda name: name,
            metadata=METADATA,
            beside=lambda folder: save_small_files(small, folder, stored, card=card),
        )


def _check(
    model: Model, small: Model, taken: Mapping[str, _Part], others: Iterable[str]
) -> None:
    """Refuse a smaller model that the parts do not make.

    Args:
        others: tensors of the layers of one of them that the other lacks.
    """
    large, wrong = _all_specs(model), sorted(others)
    for name, shape in _all_specs(small).items():
        part = taken[name]
        found = large.get(part.source)
        if found is not None and part.rows is not None:
            found = (len(part.rows), *found[1:])
        if found != shape:
            wrong.append(name)
    if wrong:
        raise NotImplementedError(
            f"{model.name} with less would have other tensors than the parts of its "
            f"own: {listed(wrong)}. zinf does not know how to prune a "
            f"{type(model.module).__name__} so."
        )


class _Taken(AbstractTensors):
    """Tensors of which some have the rows of larger ones, or other names."""

    def __init__(self, tensors: AbstractTensors, parts: Mapping[str, _Part]) -> None:
        self._tensors, self._parts = tensors, parts
        self.specs = {name: self._spec(part) for name, part in parts.items()}

    def _spec(self, part: _Part) -> ArraySpec:
        spec = self._tensors.specs[part.source]
        if part.rows is None:
            return spec
        return ArraySpec((len(part.rows), *spec.shape[1:]), spec.dtype, spec.itemsize)

    def block(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        if part.rows is None:
            return self._tensors.block(part.source)
        return (1, *self.specs[name].shape[1:])

    def copies_of(self, name: str) -> int:
        return self._tensors.copies_of(self._parts[name].source)

    def read(self, name: str, box: Box) -> np.ndarray:
        part = self._parts[name]
        if part.rows is None:
            return self._tensors.read(part.source, box)
        rows = [
            self._tensors.read(part.source, ((row, row + 1), *box[1:]))
            for row in map(int, part.rows[slice(*box[0])])
        ]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)
