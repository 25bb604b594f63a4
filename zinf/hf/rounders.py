"""How `zinf quantize` rounds the weights of a model, one layer at a time."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from zinf.adapt.adapted import ADAPTER
from zinf.adapt.record import GRAM
from zinf.adapt.scaling import Shared, shared_inputs
from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.hf.calibration import EXAMPLE, Choice, Say, sums_over_inputs
from zinf.hf.distilling import Distilling, Shifts, trained_shifts
from zinf.hf.model import Model
from zinf.hf.quantized.activations import best_scales, clipped
from zinf.hf.quantized.packed import read_floats, read_whole
from zinf.hf.quantized.rounding import DAMPING, Grid, Rounded, gptq, nearest


@dataclass(frozen=True)
class Weights:
    """The weights of a model in its files, and the grids that they are rounded to.

    Attributes:
        tensors: the parameters by name.
        bits, group: see `Grid`.
    """

    tensors: AbstractTensors
    bits: int
    group: int

    def grid(self, path: str) -> Grid:
        return Grid(self.bits, self.group, self.tensors.specs[path].dtype)

    def floats(self, path: str) -> np.ndarray:
        """A parameter, whole, in float32."""
        return read_floats(self.tensors, path)


class AbstractRounder(ABC):
    """Rounds the weights of a model, and changes what has to change with them."""

    @abstractmethod
    def round(self, path: str) -> Rounded:
        """A weight of a linear layer, rounded.

        Raises:
            ValueError: the layer has inputs that the method cannot use.
        """

    def changed(self) -> Mapping[str, np.ndarray]:
        """Parameters that are not rounded and have new values, in their dtypes."""
        return {}


@dataclass(frozen=True)
class Nearest(AbstractRounder):
    """Rounds each number by itself."""

    weights: Weights

    def round(self, path: str) -> Rounded:
        return nearest(self.weights.floats(path), self.weights.grid(path))


@dataclass(frozen=True)
class Sums:
    """The sums over the inputs of layers.

    Attributes:
        tensors: "adapter/PATH/gram"; see `zinf.adapt.record`.
    """

    tensors: AbstractTensors

    def of(self, path: str) -> np.ndarray:
        """The sum of x^T x over the inputs of a layer, float32 [inputs, inputs]."""
        return read_whole(self.tensors, f"{ADAPTER}/{path}/{GRAM}")


@dataclass(frozen=True)
class Gptq(AbstractRounder):
    """Rounds by https://arxiv.org/abs/2210.17323."""

    weights: Weights
    sums: Sums
    say: Say

    def round(self, path: str) -> Rounded:
        weight, grid = self.weights.floats(path), self.weights.grid(path)
        with _named("gptq", path):
            rounded = gptq(weight, self.sums.of(path), grid)
        more = ""
        if rounded.damping > DAMPING:
            more = f", with {rounded.damping:g} of the mean diagonal added, not "
            more += f"{DAMPING:g}"
        self.say(f"{path} is rounded{more}")
        return rounded


@dataclass(frozen=True)
class Awq(AbstractRounder):
    """Rounds by https://arxiv.org/abs/2306.00978: scales inputs, then clips weights.

    A layer whose inputs have no factor of their own has no scales, and is clipped.

    Attributes:
        rounded: the paths of all layers that are rounded.
    """

    weights: Weights
    sums: Sums
    rounded: Collection[str]
    say: Say
    # Of each layer: by what its weights are multiplied, [inputs]. Of each factor: by
    # what it is divided, and along which dim.
    _scales: dict[str, np.ndarray] = field(default_factory=dict)
    _divisors: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)

    def search(self, shared: Iterable[Shared]) -> None:
        """Find the scales of layers with factors of their own.

        Raises:
            ValueError: the inputs of a layer are all 0, or not finite.
        """
        for each in shared:
            first, layers = next(iter(each.factors)), each.layers
            weights = [self.weights.floats(path) for path in layers]
            with _named("awq", layers[0]):
                gram, grid = self.sums.of(layers[0]), self.weights.grid(layers[0])
                scales = best_scales(weights, gram, grid)
            if len(self.weights.tensors.specs[first].shape) == 1:
                # A norm is rounded to the dtype of files, and the scales with it.
                plain, dtype = self.weights.floats(first), self._dtype(first)
                kept = (plain / scales).astype(dtype).astype(np.float32)
                scales = np.divide(plain, kept, out=scales, where=kept != 0)
            self._scales.update(dict.fromkeys(layers, scales))
            self._divisors.update({p: (d, scales) for p, d in each.factors.items()})
            self.say(
                f"{first} takes the scales of {len(layers)} layers, from "
                f"{scales.min():.3g} to {scales.max():.3g}"
            )

    def round(self, path: str) -> Rounded:
        weight, gram = self._divided(path), self.sums.of(path)
        scales = self._scales.get(path)
        if scales is not None:
            weight, gram = weight * scales, gram / scales / scales[:, None]
        with _named("awq", path):
            rounded = clipped(weight, gram, self.weights.grid(path))
        self.say(f"{path} is rounded")
        return rounded

    def changed(self) -> Mapping[str, np.ndarray]:
        return {
            path: self._divided(path).astype(self._dtype(path))
            for path in self._divisors
            if path not in self.rounded
        }

    def _divided(self, path: str) -> np.ndarray:
        """A parameter, divided by the scales that it takes."""
        value = self.weights.floats(path)
        if path not in self._divisors:
            return value
        dim, scales = self._divisors[path]
        return value / scales.reshape(
            [-1 if d == dim else 1 for d in range(value.ndim)]
        )

    def _dtype(self, path: str) -> np.dtype:
        return numpy_dtype(self.weights.tensors.specs[path].dtype)


@dataclass(frozen=True)
class Lkd(AbstractRounder):
    """Rounds by https://arxiv.org/abs/2206.01861, after layers were distilled."""

    weights: Weights
    shifts: Shifts
    say: Say

    def round(self, path: str) -> Rounded:
        shift = self.shifts.of(path)
        if shift is not None and not shift.any():
            self.say(f"{path} is rounded to the nearest: it had no gradient")
        return nearest(self.weights.floats(path), self.weights.grid(path), shift)


# Methods that see texts, in the order of their help.
SEEING = ("gptq", "awq", "lkd")
METHODS = (*SEEING, "rtn")


@contextmanager
def rounding(
    method: str,
    model: Model,
    choice: Choice,
    weights: Weights,
    rows: np.ndarray | None,
    config: ConfigSource,
    distilling: Distilling,
    say: Say,
) -> Generator[AbstractRounder, None, None]:
    """What rounds by a method of `METHODS`, while the `with` block runs.

    Args:
        rows: tokens that the model sees first; None for rtn.
        distilling: how lkd trains.

    Raises:
        ValueError, InfeasibleError: see `zinf.hf.quantize`.
    """
    if rows is None:
        yield Nearest(weights)
        return
    if method == "lkd":
        grids = {path: weights.grid(path) for path in choice.paths}
        with trained_shifts(
            model, choice, grids, rows, config, distilling, say
        ) as shifts:
            yield Lkd(weights, shifts, say)
        return
    with sums_over_inputs(model, choice, rows, config, say) as tensors:
        sums = Sums(tensors)
        if method == "gptq":
            yield Gptq(weights, sums, say)
            return
        shared = shared_inputs(model.running_loss, model.zeros, batch=EXAMPLE)
        rounder = Awq(weights, sums, choice.paths, say)
        rounder.search(each for each in shared if _is_writable(each, choice))
        yield rounder


def _is_writable(shared: Shared, choice: Choice) -> bool:
    """Whether all layers are rounded, and the files have all factors as they are."""
    return set(choice.paths).issuperset(shared.layers) and set(choice.plain).issuperset(
        shared.factors
    )


@contextmanager
def _named(method: str, path: str) -> Generator[None, None, None]:
    """In the `with` block, errors of a method say of which layer they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{method} cannot round {path}: {error}. Give more texts or other ones, or "
            "take --method rtn."
        ) from error
