"""`zinf evaluate CONFIG`: the loss of a run's newest checkpoint on held-out data."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from math import exp
from pathlib import Path
from time import perf_counter

import optax

from zinf.checkpoint import Saved
from zinf.cli.places import place_of_checkpoints
from zinf.cli.task import task_of
from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import make_planner
from zinf.core.engine.named import MASTER
from zinf.core.interchange import find
from zinf.core.interchange.names import Terms
from zinf.core.interchange.place import fill
from zinf.core.interchange.sources import kept, parameters
from zinf.core.machine.devices import on_devices
from zinf.core.text.complaint import tell


class SavedEngine(Engine):
    """An engine that has the parameters of a checkpoint, and trains nothing.

    Attributes:
        weights: "master", or the kind of an average that is read in their place.
    """

    saved: Saved
    weights: str = MASTER

    def initialize_state(self) -> None:
        """Write the parameters of the checkpoint to their tiers, in parts."""
        names = {path: path for path in kept(self._runners.residents.specs)}
        terms = Terms(may_round=True)
        tensors = parameters(self.saved, self.weights)
        fill(self.planner, self._runners.residents, tensors, names, terms)


def print_run_evaluation(
    path: Path,
    overrides: Sequence[str],
    *,
    step: int | None,
    num_batches: int | None,
    weights: str | None,
) -> None:
    """Prints the mean loss that a checkpoint of a run has on its held-out data.

    The batches are those of the evaluations of `zinf train`. No state of the optimizer
    is read.

    Args:
        step: of the checkpoint; None is the newest.
        num_batches: the most batches; None takes `run.evaluate_batches`.
        weights: "master" as trained, "ema" their average; None takes `run.weights`.
    """
    config, mesh = on_devices(path, overrides=overrides)
    if config.data.traits.is_drawn:
        raise NotImplementedError(
            f"zinf evaluate does not know data.objective {config.data.objective} yet, "
            "whose batches the model draws. Rewards are in the metrics of the run."
        )
    # A teacher has no part in the loss on held-out data.
    config = config.model_copy(update={"distillation": None})
    if num_batches is not None:
        run = config.run.model_copy(update={"evaluate_batches": num_batches})
        config = config.model_copy(update={"run": run})
    folder = find(place_of_checkpoints(config), step)
    task = task_of(config)
    data = task.dataset("validation")
    with Saved(folder) as saved:
        (loss, params, _, told), named = task.arguments()
        task.read_constants()
        changed = {"frozen": ("*",), "execution": "streamed"}
        frozen = told.model_copy(update=changed)
        batch = named.pop("batch")
        planner = make_planner(
            loss, params, optax.identity(), frozen, mesh=mesh, **named
        )
        with closing(SavedEngine(planner, named["rng"])) as engine:
            engine.saved = saved
            engine.weights = weights or config.run.weights
            engine.prepare(batch)
            data, _ = task.drawn(data, engine, evaluated=MASTER)
            losses, tokens, start = [], 0, perf_counter()
            for held_out in islice(data, config.run.evaluate_batches):
                losses.append(engine.evaluate_weighted(held_out))
                tokens += task.describe(held_out)["tokens"]
            seconds = perf_counter() - start
            measured: dict[str, float] = {}
            for measure in task.measures(engine, data if losses else None):
                measure(measured)
    if not losses:
        raise ValueError(
            f"{path}: there is no held-out batch. Give more data, or set "
            "data.validation_fraction or data.evaluation_paths."
        )
    mean = sum(x.total for x in losses) / sum(x.weight for x in losses)
    has_perplexity = task.is_entropy and mean < 700
    perplexity = f"perplexity {exp(mean):.6g}, " if has_perplexity else ""
    more = "".join(
        f"{name.removeprefix('evaluation_').replace('_', ' ')} {value:.6g}, "
        for name, value in measured.items()
    )
    tell(
        f"{saved.directory.parent}: loss {mean:.6g}, {perplexity}{more}{tokens:,} "
        f"tokens of {len(losses)} batches, {tokens / seconds:,.1f} tokens/s"
    )
