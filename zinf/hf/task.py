"""The model, data and optimizer of a config whose `model.huggingface` names a model."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from xxhash import xxh3_128

from zinf.adapt import Adapted, MergedTensors
from zinf.adapt.adapted import ADAPTER, BASE
from zinf.checkpoint import Saved
from zinf.core.config import Config
from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import make_planner
from zinf.core.engine.named import MASTER
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.optim.transforms.factory import build_optimizer
from zinf.core.plan import InfeasibleError, show_bytes
from zinf.core.rollouts.rollouts import AbstractRollouts
from zinf.core.sharding import batch_share
from zinf.core.step.arrays import array_specs
from zinf.core.trainer import Hook
from zinf.data import (
    TEACHER_LOGITS,
    Bucket,
    TokenBatches,
    make_buckets,
    rate_scale,
)
from zinf.data.configured import batch_size, difficulties, paced
from zinf.data.filled import Filled
from zinf.data.share import own_rows
from zinf.data.text import Split
from zinf.distributed import AbstractGroup, Alone
from zinf.hf.analysis import about_rows
from zinf.hf.batch import IGNORED
from zinf.hf.beside import Beside, placed
from zinf.hf.card import card_of, run_of
from zinf.hf.dataset import (
    Samples,
    batches,
    check_labels,
    content_of,
    length_of,
    num_samples,
    samples_of,
    split_of,
    without_labels,
)
from zinf.hf.engine import (
    ModelEngine,
    Running,
    adapted_model,
    draws,
    freezing,
    initialize,
    running,
)
from zinf.hf.export import write_adapter, write_model
from zinf.hf.frozen import Frozen, in_words
from zinf.hf.hub import check_login, push
from zinf.hf.images.objective import check_lines, check_settings, images_in_files
from zinf.hf.judge import Judge
from zinf.hf.model import Model, load_as_stored
from zinf.hf.objectives import objective_of
from zinf.hf.objectives.objective import Objective
from zinf.hf.packing import Packed
from zinf.hf.teacher import logits_spec, open_teacher, teacher_of
from zinf.inference import ROWS
from zinf.observe.record import METRICS

ALONE = Alone()
logger = logging.getLogger(__name__)
Measure = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Task:
    """What a config asks to do with a model of `transformers`."""

    config: Config

    @property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @property
    def model(self) -> Model:
        """The model; the same object each time.

        Raises:
            ValueError: settings are about images, and it reads text alone.
        """
        if self.config.data.images is None:
            check_settings(self.config, "data.images is null, so text alone is read")
        return self.objective.model(self.config)

    @property
    def loss(self) -> Callable:
        """The loss of the objective, as a function of the parameters by name."""
        return self.objective.loss(self.model, self.config)

    @property
    def length(self) -> int:
        """Tokens of a sample.

        Raises:
            ValueError: they are more than the model was made for.
        """
        return length_of(self.model, self.config)

    def batch_spec(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of this process's part of a batch of the longest samples.

        With dynamic batching, `rows` has no effect.
        """
        if self.config.dynamic_batching is not None:
            (bucket,) = self._buckets([self.length])
            rows = self.config.num_microbatches * bucket.rows
        spec = self.objective.batch_spec(self.config, rows, self.length)
        teacher = self._teacher
        if teacher is not None:
            spec = spec | {TEACHER_LOGITS: logits_spec(teacher, rows, self.length)}
        return spec

    @property
    def _teacher(self) -> Model | None:
        """The model that a config has for a teacher, without its weights."""
        if self.config.distillation is None:
            return None
        return teacher_of(self.config, self.model, self.length)

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    @property
    def is_entropy(self) -> bool:
        return self.config.data.traits.predicts_next

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `zinf.initialize` to plan with: parameters of 0."""
        model, config, rng = self.model, self.config, self._rng
        rows = batch_size(config)
        named: dict[str, Any] = {"rng": rng, "batch": self.batch_spec(rows)}
        if self.objective.has_aux:
            named["has_aux"] = True
        tx, told = build_optimizer(config), config.told()
        if config.adapter is None:
            return (self.loss, model.zeros, tx, freezing(told, model)), named
        adapted = self.adapted()
        named["eval_loss_fn"] = adapted.eval_loss_fn
        return (adapted.loss_fn, adapted.params, tx, adapted.config(told)), named

    def adapted(self) -> Adapted:
        """The model with the adapters of the config, of which only shapes are known.

        Raises:
            ValueError: see `adapted_model`.
        """
        assert self.config.adapter is not None
        return adapted_model(
            self.model,
            self.config.adapter,
            loss=self.loss,
            batch=self.batch_spec(1),
            rng=self._rng,
        )

    def _applied(self, function: Callable) -> Callable:
        """A function of the model's parameters, as one of those of an engine."""
        if self.config.adapter is None:
            return function
        return self.adapted().applied(function)

    @property
    def _rng(self) -> jax.Array | None:
        config = self.config
        return jax.random.key(config.run.seed) if draws(self.model, config) else None

    def engine(
        self,
        mesh: Mesh,
        group: AbstractGroup = ALONE,
        judges: Sequence[Judge] | None = None,
    ) -> ModelEngine:
        """An engine with the weights of the model's files.

        If the loss needs a copy of the model as it began, reward models and a teacher,
        those are opened first, and the budgets hold for all.

        Args:
            judges: the reward models; None: those of the config.

        Raises:
            InfeasibleError: the budgets have no room for all of them.
        """
        config, drawing = self.config, self.objective.drawing
        if drawing is None and config.distillation is None:
            return self._engine(config, mesh, group)
        if drawing is None:
            return self._beside_teacher(mesh, group)
        judges = drawing.judges(config) if judges is None else judges
        policy, spec = self.model.parts[""], self.batch_spec(batch_size(config))
        beside = Beside(config, drawing, policy, judges, spec)
        trained = partial(self._engine, mesh=mesh, group=group)
        notes = partial(self.state_in_words, mesh, group)
        return beside.open(trained, mesh, group, notes)

    def _beside_teacher(self, mesh: Mesh, group: AbstractGroup) -> ModelEngine:
        """An engine in the budgets that its teacher leaves, which is opened first."""
        config, frozen, teacher = self.config, list[Frozen](), self._teacher
        assert teacher is not None
        spec = self.batch_spec(batch_size(config))
        del spec[TEACHER_LOGITS]
        with ExitStack() as stack:
            opened = open_teacher(teacher, config, mesh, spec)
            config = placed(opened.frozen, config, frozen, stack)
            try:
                engine = self._engine(config, mesh, group)
            except InfeasibleError as error:
                raise error.because(in_words(frozen)) from None
            stack.pop_all()
        engine.teacher = opened
        return engine

    def state_in_words(self, mesh: Mesh, group: AbstractGroup = ALONE) -> list[str]:
        """What each of several models that are trained together keeps, a line each."""
        parts = self.model.parts
        if len(parts) == 1:
            return []
        arguments, named = self.arguments()
        named.pop("batch")
        planner = make_planner(*arguments, **named, mesh=mesh, group=group)
        held = dict.fromkeys(parts, 0)
        for array, spec in array_specs(planner.problem, planner.separated).items():
            name = array.path.removeprefix(f"{BASE}/").removeprefix(f"{ADAPTER}/")
            held[max((p for p in parts if name.startswith(p)), key=len)] += spec.nbytes
        return [
            f"The {prefix.rstrip('.') or 'policy'} {parts[prefix].name} keeps "
            f"{show_bytes(nbytes)} of parameters, masters and moments."
            for prefix, nbytes in held.items()
        ]

    def _engine(self, config: Config, mesh: Mesh, group: AbstractGroup) -> ModelEngine:
        """An engine within the budgets of a config that may have others than `self`."""
        rows = batch_size(config) // batch_share(mesh)[1]
        data = self.token_batches()
        return initialize(
            self.model,
            build_optimizer(config, self.rate_scale()),
            config.told(),
            loss=self.loss,
            has_aux=self.objective.has_aux,
            rng=self._rng,
            batch=self.batch_spec(rows) if data is None else iter(data).whole(),
            mesh=mesh,
            group=group,
        )

    def samples(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        for_evaluation: bool = False,
    ) -> Path:
        """The folder of the tokenized samples; made now if it is not there.

        Args:
            for_evaluation: those of `data.evaluation_paths`, if there are any.
        """
        kind = self.objective.tokenizing
        rest = {"for_evaluation": for_evaluation}
        return samples_of(self.model, self.config, kind, say, **rest)

    def running(self, length: int) -> Running:
        """The model as `zinf generate` opens it, for prompts of so many tokens.

        If it was made for fewer tokens, for so many.
        """
        assert self.config.model is not None
        model = load_as_stored(str(self.config.model.huggingface))
        length = min(length, model.max_length or length)
        return running(model, self.config, rows=ROWS, length=length)

    def digests(self) -> dict[str, str]:
        """Digests of the files that are trained on, in order, and of frozen weights.

        Weights that are trained are in the checkpoint.
        """
        paths = self.config.data.paths
        paths = () if isinstance(paths, str) else paths
        others = [x[:2] for x in self.objective.tokenizing.others(paths)]
        content = json.dumps([*map(content_of, paths), *others]).encode()
        found = {"data.content": xxh3_128(content).hexdigest()}
        drawing = self.objective.drawing
        has_copy = drawing is not None and drawing.has_copy(self.config)
        if self.config.adapter is not None or has_copy:
            found["model.weights"] = self.model.digest
        if drawing is not None:
            found |= drawing.digests(self.config)
        if self._teacher is not None:
            found["distillation.teacher.weights"] = self._teacher.digest
        return found

    def check_files(self) -> None:
        """Refuse files of the model that cannot be read; samples may take minutes.

        Also settings that are about images, if no line has any.
        """
        check_lines(self.config)
        self.model.check_files()

    def check_exports(self) -> None:
        """Refuse an export that cannot be made, before the run and not after it."""
        run = self.config.run
        if run.export_adapter is not None and self.config.adapter is None:
            raise ValueError(
                "run.export_adapter names a folder, and the config has no adapter "
                "section. Remove it, or add one, such as adapter: {r: 16}."
            )
        uploads = "push_to_hub" if run.push_to_hub else None
        asked = "export_best" if run.export_best else uploads
        if asked and self._pushed is None:
            raise ValueError(
                f"run.{asked} is about a folder that is written, and neither "
                "run.export nor run.export_adapter names one. Name one, or leave it "
                "out."
            )
        if not run.push_to_hub:
            if run.hub_model_id is not None:
                raise ValueError(
                    f"run.hub_model_id is {run.hub_model_id}, and nothing is uploaded. "
                    "Set run.push_to_hub (--push-to-hub), or leave it out."
                )
            return
        check_login(self._repository)

    @property
    def _pushed(self) -> Path | None:
        """The folder that is uploaded."""
        return self.config.run.export or self.config.run.export_adapter

    @property
    def _repository(self) -> str:
        assert self._pushed is not None
        return self.config.run.hub_model_id or self._pushed.name

    def check_verified(self) -> None:
        """Refuse what `zinf verify` does not train beside plain jax."""
        raise NotImplementedError(
            "zinf verify does not train models of transformers beside plain jax. Give "
            "the folder of the model in place of the config: its class is compared "
            "with torch."
        )

    def read_constants(self) -> None:
        """Read the buffers of the files, which are constants of the loss."""
        self.model.read_buffers()

    def export(
        self,
        source: Engine | Saved,
        say: Callable[[str], None],
        *,
        step: int | None = None,
    ) -> None:
        """Write what `run.export` and `run.export_adapter` ask for, after the run.

        Args:
            source: the engine of the run, or a checkpoint of it.
            step: of the checkpoint, if it is not the last one.
        """
        run = self.config.run
        if run.export is None and run.export_adapter is None:
            return
        tensors, adapted = parameters(source, run.weights), None
        metrics = run.metrics or run.output / METRICS
        trained = run_of(self.config, metrics, step=step)
        if step is not None:
            say(f"The best evaluation was after step {step}, which is exported.")
        if self.config.adapter is not None:
            is_here = isinstance(source, ModelEngine)
            adapted = source.adapted if is_here else self.adapted()
        if run.export is not None:
            dtype = self.model.stored_dtype or self.config.compute_dtype
            whole = tensors if adapted is None else MergedTensors(adapted, tensors)
            about = {"adapter": False, "run": trained, "more": self.model.note}
            card = card_of(self.model.name, **about)
            write_model(whole, self.model, run.export, dtype=dtype, card=card)
            say(f"The tuned model is in {run.export}, in {dtype}.")
        if run.export_adapter is not None:
            assert adapted is not None, "check_exports refused it"
            write_adapter(adapted, tensors, self.model, run.export_adapter, run=trained)
            say(f"The adapter is in {run.export_adapter}.")
        if run.push_to_hub and self._pushed is not None:
            address = push(self._pushed, self._repository, private=run.hub_private_repo)
            say(f"{self._pushed} is uploaded: {address}")

    def write_adapter(self, tensors: AbstractTensors, output: Path) -> None:
        """Write the adapters among parameters of a checkpoint, as PEFT does."""
        write_adapter(self.adapted(), tensors, self.model, output)

    def write_merged(
        self,
        tensors: AbstractTensors,
        output: Path,
        names: Mapping[str, str] | None,
        **written: Any,
    ) -> None:
        """Write the model with its adapters added, in the form of its files.

        Raises:
            ValueError: `names` are given: a model of transformers has its own.
        """
        merged = MergedTensors(self.adapted(), tensors)
        if names is not None:
            raise ValueError(
                "--names is for zinf's own model: one of transformers has its names."
            )
        write_model(merged, self.model, output, **written)

    def settings_of_data(
        self, say: Callable[[str], None] = lambda text: None
    ) -> Mapping[str, Any]:
        """Keys of the data section that the config leaves open and its files decide.

        Raises:
            FileNotFoundError, ValueError: a file or a line is wrong.
        """
        config, data = self.config, self.config.data
        found: dict[str, Any] = {}
        if data.traits.takes_images and data.images is None:
            found = images_in_files(self.objective, config, say)
            config = config.model_copy(update={"data": data.model_copy(update=found)})
        settings = objective_of(config).settings_of_data
        return found | ({} if settings is None else dict(settings(config, say)))

    def steps_of_epochs(
        self, batch_size: int, epochs: float, say: Callable[[str], None]
    ) -> int:
        """Steps in which each sample is used `epochs` times, at least 1."""
        drawing = self.objective.drawing
        if drawing is not None:
            num_samples = drawing.num_samples(self.model, self.config)
            return max(1, round(epochs * num_samples / batch_size))
        data = self.token_batches(say)
        if data is not None:
            return max(1, data.order.num_batches(epochs))
        return max(1, round(epochs * len(self.rows(say)) / batch_size))

    def _buckets(self, lengths: Sequence[int] | np.ndarray) -> tuple[Bucket, ...]:
        batching = self.config.dynamic_batching
        assert batching is not None and batching.max_tokens is not None
        return make_buckets(
            lengths,
            max_tokens=batching.max_tokens,
            max_buckets=self.config.data.max_buckets,
            min_batch_size=batching.min_batch_size,
            max_batch_size=batching.max_batch_size,
        )

    def token_batches(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        process: tuple[int, int] = (0, 1),
    ) -> TokenBatches | None:
        """The batches of training, if they are made by their tokens.

        Raises:
            ValueError: a sample is too long for them; see `make_buckets`.
        """
        config, batching = self.config, self.config.dynamic_batching
        if batching is None:
            return None
        efficiency, rows = config.data_efficiency, self.rows(say)
        assert efficiency is not None and isinstance(rows, Samples)
        order, seed = batching.sequence_picking_order, config.data.seed
        return TokenBatches(
            rows,
            rows.lengths,
            self._buckets(rows.lengths),
            order="seqlen" if order == "seqlen" else "random",
            seed=efficiency.seed if order == "random" else seed,
            process=process,
            num_microbatches=config.num_microbatches,
        )

    def rate_scale(self) -> optax.Schedule | None:
        """The factor of the learning rate by number of updates; None: there is none.

        A batch of more rows than `train_batch_size` has a higher rate. Batches are
        known ahead, so the rate is a function of the number of updates done.
        """
        data, batching = self.token_batches(), self.config.dynamic_batching
        if data is None or batching is None or batching.lr_scaling_method == "none":
            return None
        base, method = self.config.batch_size, batching.lr_scaling_method
        assert base is not None, "a step needs a batch size"
        scales = jnp.array(
            [rate_scale(data.num_rows(b), base, method) for b in data.buckets],
            jnp.float32,
        )
        bucket_of = jnp.array(data.order.buckets(self.config.run.steps), jnp.uint16)
        return lambda count: scales[bucket_of[jnp.minimum(count, len(bucket_of) - 1)]]

    def rows(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        is_training: bool = True,
    ) -> grain.sources.RandomAccessDataSource:
        """The rows of a split, of which batches are made.

        Raises:
            NotImplementedError: rows would have several samples, and the model cannot
                keep them apart.
        """
        data, model = self.config.data, self.model
        if data.packing:
            model.check_packing()
        folder = self.samples(say, for_evaluation=not is_training)
        fraction, each = data.validation_fraction, data.traits.num_sequences
        if data.evaluation_paths is not None:
            # All of the files of a split are its own.
            fraction = 0.0 if is_training else 1.0
        count = num_samples(folder) // each
        first, last = split_of(count, fraction, is_training=is_training)
        samples = self._opened(folder, first * each, last * each)
        return self.objective.rows(samples, model, self.config)

    def _opened(self, folder: Path, first: int, last: int) -> Samples:
        """Samples of a folder of `tokenized`, of which `first` is the first one."""
        model = self.model
        where = {"length": self.length, "padding": model.padding}
        where |= {"first": first, "last": last}
        return self.objective.samples(folder, model, self.config, **where)

    def before_training(self, engine: Any, say: Callable[[str], None]) -> None:
        """Compute what batches need of the model as it is before the first step."""
        before, config = self.objective.before_training, self.config
        if before is None:
            return
        folders = [self.samples()]
        if config.run.evaluate_every and config.data.evaluation_paths is not None:
            folders.append(self.samples(for_evaluation=True))
        files = [self._opened(f, 0, num_samples(f)) for f in folders]
        before(engine, config, files, say)

    def measures(
        self, engine: Any, batches: Iterable[Any] | None, *, weights: str = MASTER
    ) -> tuple[Measure, ...]:
        """Measures of an evaluation beside the loss, if the objective has any.

        Each adds to the metrics of a step, and has a pass of its own.

        Args:
            batches: those of an evaluation; None: there is none.
            weights: the kind of weights that is evaluated, see `Engine.apply`.
        """
        if batches is None or self.objective.outputs is None:
            return ()
        function = self._applied(partial(self.objective.outputs, self.model))
        apply = partial(engine.apply, function, kind=weights)
        return (partial(self._measure, engine.planner, batches, apply),)

    def _measure(
        self,
        planner: Any,
        batches: Iterable[Any],
        apply: Callable,
        metrics: dict[str, Any],
    ) -> None:
        """Add the means of the measures of the objective to metrics of a step."""
        measures = self.objective.measures
        assert measures is not None, "outputs are there to be measured"
        values: dict[str, list[np.ndarray]] = {}
        for batch in islice(batches, self.config.run.evaluate_batches):
            outputs = own_rows(apply(batch), planner.batch_share)
            for name, found in measures(outputs, batch).items():
                values.setdefault(name, []).append(found)
        for name, parts in values.items():
            here = np.concatenate(parts)
            sums = planner.group.gather(name, [float(here.sum()), len(here)])
            total, count = np.sum(sums, axis=0)
            metrics[f"evaluation_{name}"] = float(total / count)

    def drawn(
        self, data: grain.IterDataset, engine: Any, *, evaluated: str | None = None
    ) -> tuple[grain.IterDataset, Sequence[Hook]]:
        """The batches of `dataset`, and what to call after each step.

        The engine draws them, or is asked of them, if the objective has it so. A
        teacher is asked in training alone: evaluations have the student's own loss.

        Args:
            evaluated: the kind of weights that the batches evaluate, see
                `Engine.apply`; None: they are trained on.
        """
        drawing, asks = self.objective.drawing, self.objective.asks
        if asks is not None:
            apply = partial(engine.apply, kind=evaluated or MASTER)
            asked = asks(apply, self.model, self._applied, self.config)
            return data.map(asked), (Hook(asked.told),)
        if drawing is None:
            is_taught = evaluated is None and self.config.distillation is not None
            return engine.teacher.taught(data, self.config) if is_taught else data, ()
        assert isinstance(data, AbstractRollouts), "made by `dataset`"
        found = drawing.by(data, engine, self.config)
        return found, (found.hook,)

    @staticmethod
    def describe(batch: Mapping[str, np.ndarray]) -> dict[str, int]:
        """For the metrics: the length of rows, and the tokens trained on, or read.

        Also the tokens of a row that layers keep which drop tokens.
        """
        if "attention_mask" in batch:
            is_counted = batch["attention_mask"]
        else:
            is_counted = batch["labels"][..., 1:] != IGNORED
        length = batch["input_ids"].shape[-1]
        return {
            "sequence_length": length,
            "kept_tokens": batch["kept"].shape[2] if "kept" in batch else length,
            "tokens": int(np.count_nonzero(is_counted)),
        }

    def dataset(
        self,
        split: Split,
        group: AbstractGroup = ALONE,
        *,
        process: tuple[int, int] = (0, 1),
        say: Callable[[str], None] = lambda text: None,
    ) -> grain.IterDataset:
        """This process's share of the batches.

        Args:
            process: (index, count): which of the shares.
        """
        drawing = self.objective.drawing
        if drawing is not None:
            found = drawing.dataset(self.model, self.config)
            say(f"data: {found.brief()}")
            return found
        config = self.config
        size, is_training = batch_size(config), split == "train"
        data = self.token_batches(say, process=process) if is_training else None
        if data is not None:
            shapes = ", ".join(f"{data.num_rows(b)} x {b.length}" for b in data.buckets)
            say(f"data: batches have {shapes} tokens")
            return data
        rows = self.rows(say, is_training=is_training)
        efficiency, seed, metrics = config.data_efficiency, config.data.seed, None
        drawn = difficulties(config) if is_training else None
        num_epochs = None if efficiency is None else efficiency.num_epochs
        if efficiency is not None and drawn is not None:
            seed = efficiency.seed
            assert isinstance(rows, Samples | Packed), "the config was checked"
            told = about_rows(rows, config.data.validation_fraction)
            metrics = drawn(len(rows), told)
        found = batches(
            rows if is_training else Filled(rows, size, without_labels),
            batch_size=size,
            seed=seed,
            split=split,
            num_epochs=num_epochs if is_training else 1,
            metrics=metrics,
            process=process,
            num_microbatches=config.num_microbatches,
        )
        # Several processes do not know each other's rows, and all need one shape.
        if self.objective.trimmed is not None and group.count == 1:
            found = found.map(partial(self.objective.trimmed, self.model))
        if not is_training:
            return found
        if config.kept_tokens is not None:
            self.model.check_dropping()
        # With several processes, each knows only its own rows of a batch.
        check = check_labels if group.count == 1 else None
        return paced(config, found, leaf="input_ids", extra=0, check=check)
