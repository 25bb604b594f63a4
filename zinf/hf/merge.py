"""`zinf.hf.merge`: a model whose weights are means of those of several models.

Assembly of Experts (https://arxiv.org/abs/2506.14794): models that were tuned from one
model are joined tensor by tensor, all of their tensors or those of routed experts. A
tensor in which the models hardly differ stays that of the first one.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from zinf.core.interchange.folder import check_target
from zinf.core.interchange.names import Terms, listed, match
from zinf.core.interchange.safetensors_export import MAX_SHARD_BYTES, export_safetensors
from zinf.core.interchange.tensors import AbstractTensors, boxes
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.sharding import Box
from zinf.hf.card import card_of
from zinf.hf.experts import routed
from zinf.hf.export import METADATA, save_small_files
from zinf.hf.exported import ExportedWeights
from zinf.hf.model import Model

EXPERTS = "experts"
# Keys of config.json that change nothing of what a model computes.
ABOUT = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def merge(
    models: Sequence[Model],
    output: Path | str,
    *,
    shares: Sequence[float] | None = None,
    only: Literal["all", "experts"] = "all",
    threshold: float = 0.0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a model whose tensors are weighted means of those of several models.

    It has the configuration, tokenizer, buffers and dtype of the first model. Means are
    in float32, and are read and written in parts.

    Args:
        models: of one architecture, with tensors of the same names and shapes.
        output: absent or empty. It appears only when it is complete.
        shares: of each model in the means, which are divided by the sum of them; None:
            all alike. With `only="experts"` and (0, 1) the model is the first one with
            the experts of the second.
        only: which parameters: all, or those of routed experts.
        threshold: a tensor is that of the first model, unless the root mean square of
            its difference from that of some other model is larger; each expert is a
            tensor here. 0: all are means.
        say: gets lines about progress.

    Raises:
        ValueError: an argument is wrong, models differ in architecture or tensors, or
            have no routed experts.
        FileExistsError, StorageError: see `zinf.interchange.export_safetensors`.
    """
    output = Path(output)
    check_target(output, 0)
    given = check_merging(models, shares, threshold)
    first = models[0]
    owners = routed(first.module)
    if only == EXPERTS and not owners:
        raise ValueError(
            f"{first.name} (a {type(first.module).__name__}) has no routed experts "
            "that zinf knows. Merge all tensors (--only all)."
        )
    for model in models[1:]:
        others = _other_settings(first, model)
        if others:
            say(
                f"{model.name} has other values of {listed(others)} in config.json; "
                f"those of {first.name} are written"
            )
    first.read_buffers()
    with ExitStack() as stack:
        sources = []
        for model in models:
            files, weights = model.open_weights()
            stack.enter_context(files)
            match(
                first.specs, weights.specs, {n: n for n in first.specs}, _terms(model)
            )
            sources.append(_Source(weights, given[len(sources)]))
        merged = _Merged(sources, first, owners, only)
        if threshold > 0:
            merged.keep_alike(threshold, say)
        names = " and ".join(
            f"{m.name} ({x:.4g})" for m, x in zip(models, given, strict=True)
        )
        what = "Routed experts" if only == EXPERTS else "Weights"
        card = card_of(
            first.name, adapter=False, more=f"{what} are means of those of {names}."
        )
        stored = first.stored_dtype or first.dtype
        export_safetensors(
            ExportedWeights(merged, first.module, first.persistent_buffers()),
            output,
            max_shard_bytes=max_shard_bytes,
            names=lambda name: name,
            metadata=METADATA,
            beside=lambda folder: save_small_files(first, folder, stored, card=card),
        )


def check_merging(
    models: Sequence[Model], shares: Sequence[float] | None, threshold: float
) -> list[float]:
    """The share of each model, of 1; refuses what cannot be merged, by name.

    Raises:
        ValueError: see `merge`.
    """
    if len(models) < 2:
        raise ValueError("A merge needs two models or more. Name another one.")
    given = [1.0] * len(models) if shares is None else list(map(float, shares))
    is_sound = all(np.isfinite(x) and x >= 0 for x in given) and sum(given) > 0
    if len(given) != len(models) or not is_sound:
        shown = ", ".join(f"{x:g}" for x in given)
        raise ValueError(
            f"{len(models)} models have the shares {shown}; "
            "each needs one that is 0 or more, and some have to be more (--shares)."
        )
    if not threshold >= 0:
        raise ValueError(f"The threshold is {threshold:g}; it must be 0 or more.")
    kinds = [type(model.module).__name__ for model in models]
    for model, kind in zip(models, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"{models[0].name} is a {kinds[0]} and {model.name} a {kind}. Models "
                "of one architecture can be merged."
            )
        if model.adapter is not None:
            raise ValueError(
                f"{model.adapter.folder} has an adapter, and merges are of whole "
                "models. Write the merged model first (zinf checkpoint export --merge)."
            )
    return [x / sum(given) for x in given]


def _other_settings(first: Model, model: Model) -> list[str]:
    """Keys of the configuration of a model that differ from those of the first."""
    one, two = first.config.to_dict(), model.config.to_dict()
    keys = dict.fromkeys([*one, *two])
    return [k for k in keys if k not in ABOUT and one.get(k) != two.get(k)]


def _terms(model: Model) -> Terms:
    remedy = f"Here is the first model, there {model.name}: all need the same tensors."
    return Terms(ignore=model.terms.ignore, may_round=True, remedy=remedy)


@dataclass(frozen=True)
class _Source:
    """The weights of a model, and its share in the means."""

    weights: AbstractTensors
    share: float


class _Merged(AbstractTensors):
    """The parameters of a model, of which some are means over several models.

    Args:
        sources: the first one has the parameters that are no means.
        owners: modules whose parameters have a row for each expert.
        only: see `merge`.
    """

    def __init__(
        self,
        sources: Sequence[_Source],
        model: Model,
        owners: Collection[str],
        only: str,
    ) -> None:
        self._sources = sources
        self._first = sources[0].weights
        self.specs = {name: self._first.specs[name] for name in model.specs}
        self._by_expert = {
            name for name in self.specs if name.rpartition(".")[0] in owners
        }
        # Of each mean: which experts are those of the first model, or whether all is.
        chosen = self._by_expert if only == EXPERTS else self.specs
        self._kept: dict[str, np.ndarray] = {
            name: np.zeros(self._num_tensors(name), bool) for name in chosen
        }

    def keep_alike(self, threshold: float, say: Callable[[str], None]) -> None:
        """Leave tensors as they are in the first model if no other differs by more."""
        for name, kept in self._kept.items():
            kept[:] = ~self._differs(name, threshold)
        count = sum(len(kept) for kept in self._kept.values())
        alike = sum(int(kept.sum()) for kept in self._kept.values())
        say(f"{alike:,} of {count:,} tensors differ by {threshold:g} at most, and stay")

    def block(self, name: str) -> tuple[int, ...]:
        block = self._first.block(name)
        return (1, *block[1:]) if name in self._by_expert else block

    def copies_of(self, name: str) -> int:
        if name not in self._kept:
            return self._first.copies_of(name)
        read = max(source.weights.copies_of(name) for source in self._sources)
        # The sum, and one more product, in float32; and the part of the mean.
        return read + 2 * -(-4 // self.specs[name].itemsize) + 1

    def read(self, name: str, box: Box) -> np.ndarray:
        if name in self._by_expert and box[0][1] - box[0][0] > 1:
            rows = (((i, i + 1), *box[1:]) for i in range(*box[0]))
            return np.concatenate([self.read(name, row) for row in rows])
        if name not in self._kept or self._is_kept(name, box):
            return self._first.read(name, box)
        total = None
        for source in self._sources:
            if source.share == 0:
                continue
            part = source.weights.read(name, box).astype(np.float32)
            part *= np.float32(source.share)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        return total.astype(numpy_dtype(self.specs[name].dtype), copy=False)

    def _num_tensors(self, name: str) -> int:
        return self.specs[name].shape[0] if name in self._by_expert else 1

    def _is_kept(self, name: str, box: Box) -> bool:
        kept = self._kept[name]
        return bool(kept[box[0][0]] if len(kept) > 1 else kept[0])

    def _differs(self, name: str, threshold: float) -> np.ndarray:
        """Whether each tensor of a parameter differs by more, in root mean square."""
        spec, kept = self.specs[name], self._kept[name]
        found = np.zeros(len(kept), bool)
        for other in self._sources[1:]:
            sums = np.zeros(len(kept), np.float64)
            for box in boxes(spec.shape, self.block(name)):
                gap = other.weights.read(name, box).astype(np.float32)
                gap -= self._first.read(name, box).astype(np.float32)
                row = box[0][0] if len(kept) > 1 else 0
                sums[row] += float(np.vdot(gap, gap))
            found |= np.sqrt(sums * len(kept) / max(1, prod(spec.shape))) > threshold
        return found
