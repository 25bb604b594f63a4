"""Trains how the weights of a model are rounded, layer by layer, for `zinf quantize`.

ZeroQuant's layer-by-layer knowledge distillation (https://arxiv.org/abs/2206.01861,
section 4.3): see `zinf.adapt.distill`. Scales are those of rounding to the nearest, and
what is trained is a shift of each number before it is rounded, in codes. So a learning
rate means the same for all weights: a share of a code for each step of Adam.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optax

from zinf.adapt.adapted import ADAPTER
from zinf.adapt.distill import SHIFT, distilling, layer_name
from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.sources import EngineTensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.hf.calibration import Choice, Say, batches_of, calibrator
from zinf.hf.model import Model
from zinf.hf.quantized.packed import read_whole
from zinf.hf.quantized.rounding import Grid
from zinf.hf.quantized.straight_through import rounded

# Lines about progress while layers are trained.
NUM_LINES = 10


@dataclass(frozen=True)
class Distilling:
    """How layers are trained.

    Attributes:
        steps: of Adam, each over 16 rows at most; all rows are seen in turn.
        learning_rate: of the first step, in codes; it falls to 0 evenly.

    Raises:
        ValueError: one of them is not above 0.
    """

    steps: int = 400
    learning_rate: float = 0.005

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.learning_rate < float("inf"):
            raise ValueError(
                f"lkd takes {self.steps:,} steps at a learning rate of "
                f"{self.learning_rate:g}, and both must be above 0 (--lkd-steps, "
                "--lkd-learning-rate)."
            )


@dataclass(frozen=True)
class Shifts:
    """What was trained.

    Attributes:
        tensors: "adapter/PATH/shift"; see `zinf.adapt.distill`.
        worse: layers whose errors are larger than at first.
    """

    tensors: AbstractTensors
    worse: frozenset[str]

    def of(self, path: str) -> np.ndarray | None:
        """The shift of a weight, as `nearest` takes it; None: none helped its layer."""
        if layer_name(path) in self.worse:
            return None
        return read_whole(self.tensors, f"{ADAPTER}/{path}/{SHIFT}")


@contextmanager
def trained_shifts(
    model: Model,
    choice: Choice,
    grids: Mapping[str, Grid],
    rows: np.ndarray,
    config: ConfigSource,
    settings: Distilling,
    say: Say = lambda text: None,
) -> Generator[Shifts, None, None]:
    """The shifts of the chosen weights, while the `with` block runs.

    Args:
        grids: of the chosen weights, by path.
        say: gets the mean squared error of each layer's outputs for the rows of the
            first step, as it begins and when these rows are seen last.
    """
    adapted = distilling(
        model.running_loss,
        model.zeros,
        choice.found,
        {path: partial(rounded, grids[path]) for path in choice.paths},
    )
    rate = optax.linear_schedule(settings.learning_rate, 0.0, settings.steps)
    batches = batches_of(rows)
    first: dict[str, float] = {}
    last = first
    with calibrator(
        model, adapted, optax.adam(rate), batches[0], config, has_aux=True
    ) as engine:
        for step in range(settings.steps):
            metrics = engine.step(batches[step % len(batches)])
            if step % len(batches) == 0:
                last = _errors(metrics)
                first = first or last
            done = step + 1
            if done * NUM_LINES // settings.steps > step * NUM_LINES // settings.steps:
                say(f"{done:,} of {settings.steps:,} steps, loss {metrics['loss']:.4g}")
        worse = frozenset(name for name, x in first.items() if last[name] > x)
        for name, error in first.items():
            more = "; so it is rounded to the nearest" if name in worse else ""
            say(
                f"{name}: error {error:.4g} at first, {last[name]:.4g} in the end{more}"
            )
        yield Shifts(EngineTensors(engine), worse)


def _errors(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The mean squared error of each layer, over the microbatches of a step."""
    return {name: float(np.mean(x)) for name, x in metrics["aux"].items()}
