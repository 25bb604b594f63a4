"""What a run from rewards costs, from plans alone: no weight is needed.

The models are planned as a run places them: the reference and the reward models first,
each within its share, and the model in training within what they leave. Then come the
programs of a rollout over the arrays in training: generation and scores.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zinf.adapt import Adapted
from zinf.core.config import Config
from zinf.core.engine.initialize import make_planner
from zinf.core.engine.named import MASTER, instead_of
from zinf.core.optim.average import REFERENCE
from zinf.core.plan import InfeasibleError
from zinf.core.program import Tier
from zinf.core.segment import NOTHING, Instead, user_function
from zinf.core.step.batch import batch_spec
from zinf.core.step.forward import Forward, plan_forward
from zinf.core.step.planner import Planner
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.setup import AtRest
from zinf.core.topology import Topology
from zinf.data.configured import batch_size
from zinf.hf.engine import Running, decoder_for, running
from zinf.hf.frozen import Held, in_words, share, within_share
from zinf.hf.judge import ROWS_AT_ONCE, Judge
from zinf.hf.model import Model
from zinf.hf.objectives.from_rewards import Scores
from zinf.hf.objectives.objective import Drawing
from zinf.hf.reference import TEACHER, check_length
from zinf.hf.task import Task
from zinf.inference import ROWS, GenerationPlanner, Pace, Sampling, Steps
from zinf.inference.choose import fused_or_not
from zinf.inference.forecast import Forecast
from zinf.inference.prompts import shape_of

# The leaves of a batch that log-probabilities are made of.
SCORED = ("input_ids", "labels")


@dataclass(frozen=True)
class Scoring:
    """A pass over completions that scores them.

    Attributes:
        title: of what scores them.
        seconds: of all completions drawn at once.
    """

    title: str
    seconds: float


@dataclass(frozen=True)
class Foresight:
    """What a run from rewards costs.

    Attributes:
        frozen: the models beside the one in training, in the order of placing.
        made: the step, within what they leave.
        drawn: completions that are drawn at once.
        num_steps: steps that are made of them.
        num_tokens: most tokens of a completion.
        generation: of as many of them as are completed together.
        scorings: passes over all of them.
    """

    frozen: tuple[Held, ...]
    made: AbstractPrepared
    drawn: int
    num_steps: int
    num_tokens: int
    generation: Forecast
    scorings: tuple[Scoring, ...]

    @property
    def generation_seconds(self) -> float:
        """Seconds in which all completions are drawn, if all have the most tokens."""
        passes = -(-self.drawn // self.generation.batch_size)
        each = self.generation.decode_seconds * (self.num_tokens - 1)
        return passes * (self.generation.prefill_seconds + each)

    @property
    def scoring_seconds(self) -> float:
        return sum(scoring.seconds for scoring in self.scorings)

    @property
    def steps_seconds(self) -> float:
        return self.num_steps * self.made.plan.timeline.seconds

    @property
    def seconds(self) -> float:
        """Seconds of a rollout with its scores and its steps."""
        return self.generation_seconds + self.scoring_seconds + self.steps_seconds


def foresee(
    task: Task, mesh: Mesh, machine: Topology | None, pace: Pace, *, prompt_length: int
) -> Foresight:
    """Plan all that a run from rewards does.

    Args:
        task: of a config with an objective that has its data drawn.
        machine: of the mesh, if nothing is run.
        prompt_length: tokens of a prompt.

    Raises:
        InfeasibleError: a model, or a pass, does not fit; the message names it.
        ValueError, NotImplementedError: see `Drawing.judges` and `Task`.
    """
    drawing, settings = task.objective.drawing, task.config.completions
    assert drawing is not None, "the objective is drawn"
    planning = _Planning(task, drawing, mesh, machine, pace)
    beside = task.config
    policy, judges = task.model.parts[""], drawing.judges(task.config)
    if drawing.has_copy(task.config):
        beside = planning.scored_by(policy, "the reference", beside)
    for number, judge in enumerate(judges, 2):
        beside = planning.judge(judge, beside, number)
    teacher = drawing.teacher(policy, task.config)
    if teacher is not None:
        check_length(teacher, task.length)
        number, title = 2 + len(judges), f"the {TEACHER}"
        beside = planning.scored_by(teacher, title, beside, number=number)
    trained = planning.trained(beside)
    planning.passes(trained)
    return Foresight(
        tuple(planning.frozen),
        trained.prepared,
        planning.drawn,
        planning.num_batches * settings.num_uses,
        settings.max_new_tokens,
        planning.generation(trained, prompt_length),
        tuple(planning.scorings),
    )


@dataclass(frozen=True)
class _Trained:
    """The model in training as it is planned: its arrays, and its adapters if any."""

    planner: Planner
    prepared: AbstractPrepared
    adapted: Adapted | None

    @property
    def at_rest(self) -> AtRest:
        return AtRest(self.prepared.plan.homes, self.prepared.layouts)


@dataclass(frozen=True)
class _Planning:
    """The models of a run, planned one after the other.

    Attributes:
        frozen, scorings: of the models that were planned so far.
    """

    task: Task
    drawing: Drawing
    mesh: Mesh
    machine: Topology | None
    pace: Pace
    frozen: list[Held] = field(default_factory=list)
    scorings: list[Scoring] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        return self.drawing.drawn_at_once(self.task.config)

    @property
    def num_batches(self) -> int:
        """Batches of a step that are drawn at once."""
        return self.drawn // batch_size(self.task.config)

    def scored_by(
        self, model: Model, title: str, config: Config, *, number: int = 1
    ) -> Config:
        """Plan a frozen model that scores tokens; the config of what is next."""
        scores = Scores(model, self.task.config.completions.temperature)
        batch, count = self._batch(SCORED), self.task.config.num_microbatches
        run = partial(running, model, rows=batch_size(config), length=self.task.length)
        given = title, run, scores, batch, count, config
        held, seconds = self._frozen(*given, number=number)
        self.scorings.append(Scoring(held.title, self.num_batches * seconds))
        return held.beside(config)

    def judge(self, judge: Judge, config: Config, number: int) -> Config:
        """Plan a reward model; the config of what is planned next."""
        rows, title = batch_size(config), f"the reward model {judge.name}"
        prefill = judge.prefill_of(config, rows=rows, length=self.task.length)
        longest = prefill.bucket(judge.longest_of(self.task.length))
        size = prefill.rows(longest)
        count = -(-min(rows, ROWS_AT_ONCE) // size)
        batch = _rows(("input_ids", "attention_mask"), count * size, longest)
        batch |= judge.image_specs(count * size, longest)

        def run(own: Config) -> Running:
            own = own.model_copy(update={"weight_quantization": None})
            return running(judge.model, own, rows=size, length=longest)

        given = title, run, judge.model.logits, batch, count, config
        held, seconds = self._frozen(*given, number=number)
        num_passes = -(-self.drawn // (count * size))
        self.scorings.append(Scoring(title, num_passes * seconds))
        return held.beside(config)

    def trained(self, config: Config) -> _Trained:
        """Plan the step of the model in training.

        Raises:
            InfeasibleError: it does not fit; the message says what all models take.
        """
        try:
            arguments, named = Task(config).arguments()
            batch = named.pop("batch")
            where = {"mesh": self.mesh, "topology": self.machine}
            planner = make_planner(*arguments, **named, **where)
            prepared = planner.plan_batch(batch)
        except InfeasibleError as error:
            notes = in_words(self.frozen) + self.task.state_in_words(self.mesh)
            raise error.because(notes) from None
        has_adapters = config.adapter is not None
        adapted = self.task.adapted() if has_adapters else None
        return _Trained(planner, prepared, adapted)

    def passes(self, trained: _Trained) -> None:
        """Plan what the model in training says of rows, and its base if need be."""
        model, config = self.task.model, self.task.config
        adapted, settings = trained.adapted, config.completions
        scores = Scores(model, settings.temperature)
        asked = {"the model in training": (scores, SCORED)}
        asked |= {n: (f, ("input_ids",)) for n, f in self.drawing.asked(model).items()}
        found: dict[str, tuple[Callable, tuple[str, ...]]] = dict(asked)
        kinds = {}
        if adapted is not None:
            found = {n: (adapted.applied(f), names) for n, (f, names) in asked.items()}
            if settings.penalty:
                base = adapted.unchanged(scores, reads=model.parts[""].specs)
                found["the reference (the base)"] = base, SCORED
        elif config.syncs_reference:
            found["the reference"] = scores, SCORED
            kinds["the reference"] = REFERENCE
        for title, (function, names) in found.items():
            rest = self._batch(names), config.num_microbatches
            instead = instead_of(trained.planner, kinds.get(title, MASTER))
            given = trained.planner, trained.at_rest, function, *rest
            made = _forward(*given, instead=instead)
            seconds = self.num_batches * self.pace.timeline(made).seconds
            self.scorings.append(Scoring(title, seconds))

    def generation(self, trained: _Trained, prompt_length: int) -> Forecast:
        """Generation of as many completions together as fit."""
        settings = self.task.config.completions
        steps = Steps(
            trained.planner.problem,
            decoder_for(self.task.model, trained.adapted, trained.planner),
            Sampling(temperature=settings.temperature),
            trained.planner.problem.bound,
            jax.random.key(0),
        )
        generating = GenerationPlanner(
            trained.planner,
            trained.at_rest,
            steps,
            self.task.config.execution,
        )
        shape = shape_of(ROWS, prompt_length, settings.max_new_tokens)
        made = generating.most(generating.plan(shape), -(-self.drawn // ROWS))
        batch = min(self.drawn, made.num_microbatches * ROWS)
        return Forecast(batch, made, *fused_or_not(generating, shape), self.pace)

    def _batch(self, names: tuple[str, ...]) -> dict[str, Any]:
        return _rows(names, batch_size(self.task.config), self.task.length)

    def _frozen(
        self,
        title: str,
        run: Callable[[Config], Running],
        function: Callable,
        batch: Mapping[str, Any],
        num_microbatches: int,
        config: Config,
        *,
        number: int = 1,
    ) -> tuple[Held, float]:
        """What a frozen model holds, and the seconds of a pass over a batch."""
        own, budgets = share(config, self.mesh, self.machine, number=number)
        with within_share(title):
            ran = run(own)
            planner = ran.planner(mesh=self.mesh, topology=self.machine)
            placed = planner.plan(planner.batch_spec(ran.batch))
            at_rest = AtRest(placed.plan.homes, placed.layouts)
            made = _forward(planner, at_rest, function, batch, num_microbatches)
        peaks = placed.plan.peak_bytes, made.plan.peak_bytes
        held = {tier: max(peak[tier] for peak in peaks) for tier in Tier}
        self.frozen.append(Held(title, ran.model.name, held, budgets))
        return self.frozen[-1], self.pace.timeline(made).seconds


def _rows(names: tuple[str, ...], rows: int, length: int) -> dict[str, Any]:
    return dict.fromkeys(names, jax.ShapeDtypeStruct((rows, length), np.int32))


def _forward(
    planner: Planner,
    at_rest: AtRest,
    function: Callable,
    batch: Mapping[str, Any],
    num_microbatches: int,
    *,
    instead: Instead = NOTHING,
) -> Forward:
    """The pass of a function over a batch, beside the arrays at rest."""
    setting = {"setting": "num_microbatches"}
    return plan_forward(
        planner,
        user_function(function, planner.problem, None),
        batch_spec(batch, num_microbatches, planner.num_shares, **setting),
        at_rest,
        num_microbatches=num_microbatches,
        instead=instead,
    )
