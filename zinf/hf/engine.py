"""`zinf.hf.initialize`: an engine whose weights come from the files of a model."""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zinf.adapt import Adapted, adapt, load_adapter
from zinf.adapt.adapted import ADAPTER, BASE
from zinf.adapt.files import WEIGHTS as ADAPTER_FILE
from zinf.adapt.peft import Naming
from zinf.adapt.state import FirstState
from zinf.checkpoint.saved import Saved
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter
from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import ConfigSource, make_planner, measuring
from zinf.core.engine.named import MASTER
from zinf.core.engine.tempered import tempered
from zinf.core.interchange.names import listed
from zinf.core.interchange.place import fill
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.machine.devices import on_devices
from zinf.core.program import ArrayId
from zinf.core.sharding import rows_of_process
from zinf.core.step.planner import Planner
from zinf.core.topology import Topology
from zinf.distributed import AbstractGroup
from zinf.hf.adapter import SavedAdapter, naming_of
from zinf.hf.comparison import check_class
from zinf.hf.decoded import decoded_arrays
from zinf.hf.decoder import AbstractBeside, decoder_of
from zinf.hf.model import Model
from zinf.inference import Decoder

logger = logging.getLogger(__name__)
TRACED_TOKENS = 8


class ModelEngine(Engine):
    """An engine that trains a `transformers` model; made by `initialize`."""

    _model: Model
    _adapted: Adapted | None = None
    _own_decoder: Decoder | None = None
    # A frozen copy of the model as it began, from a batch to log-probabilities; a
    # teacher, which in grpo does the same and in distillation is a `teacher.Teacher`;
    # opened reward models. All are closed with the engine.
    reference: Any = None
    teacher: Any = None
    judges: tuple[Any, ...] = ()

    def close(self) -> None:
        """Free every tier, and those of frozen models beside it; see `Engine.close`."""
        super().close()
        for scores in (self.reference, self.teacher):
            if scores is not None:
                scores.frozen.close()
        for judge in self.judges:
            judge.close()

    @property
    def model(self) -> Model:
        """The model, without its weights."""
        return self._model

    @property
    def adapted(self) -> Adapted | None:
        """The adapters beside frozen weights, and how these are kept in few bits; None:
        the engine has the model's parameters as they are."""
        return self._adapted

    def applied(self, function: Callable) -> Callable:
        """Turn a function of the model's parameters into one for `apply`."""
        return function if self._adapted is None else self._adapted.applied(function)

    def step(self, batch: Any) -> dict[str, Any]:
        """Take a step; see `Engine.step`.

        Raises:
            ValueError: the batch has tokens that the model does not know, or none that
                is trained on; the message names the sample.
        """
        self._model.check(batch)
        return super().step(batch)

    def evaluate(self, batch: Any, *, kind: str = MASTER) -> float:
        """The mean loss of a batch; see `Engine.evaluate` and `step`."""
        self._model.check(batch)
        return super().evaluate(batch, kind=kind)

    def _decoder(self, given: Decoder | None) -> Decoder:
        if given is not None:
            return given
        if self._own_decoder is None:
            self._own_decoder = decoder_for(self._model, self._adapted, self.planner)
        return self._own_decoder

    def _token_scores(self, temperature: float) -> Callable:
        return self.applied(tempered(self._model.token_log_probabilities, temperature))

    def _in_other_forms(self, saved: Saved) -> Collection[ArrayId]:
        if self._adapted is None:
            return ()
        residents = self._runners.residents
        return decoded_arrays(saved, residents, self._model, self._adapted)

    def initialize_state(self) -> None:
        """Write the weights of the model's files to their tiers, in parts.

        Each of several processes reads files of its own, and keeps its shares.

        Raises:
            ValueError: as for `Engine.initialize_state`; or files lack a tensor, or
                have one of another shape.
        """
        model = self._model
        files, weights = model.open_weights()
        with files:
            if weights.unused:
                logger.warning(
                    f"{model.name}: {len(weights.unused)} tensors of the files are "
                    "not read, as the model has no place for them: "
                    f"{listed(weights.unused)}"
                )
            if weights.new:
                logger.warning(
                    f"{listed(weights.new)}: the files have no such weights, so "
                    "training begins with initial values."
                )
            terms = model.terms
            state: AbstractTensors = weights
            names = list(model.specs)
            begun = None if self._adapted is None else self._adapted.adapter.begin_from
            if begun is not None:
                naming = naming_of(model.module)
                SavedAdapter(begun, {}).check_frozen(weights, naming)
            if self._adapted is not None:
                state = FirstState(self._adapted, weights, terms, weights.codes)
                names = list(state.specs)
            digests = fill(
                self.planner,
                self._runners.residents,
                state,
                {n: n for n in names},
                terms,
            )
        self._agree(digests)


def open_model(
    model: Model,
    config: ConfigSource = None,
    *,
    rows: int,
    length: int,
    group: AbstractGroup | None = None,
) -> ModelEngine:
    """An engine that runs a model and trains nothing, with the weights of its files.

    If the model was loaded with an adapter, its factors rest beside the weights, and
    each segment multiplies by both, as in training: nothing is merged.

    Args:
        config: budgets, folders and tiers; what it says of training has no effect.
            With a `weight_quantization` section, weights of linear layers are encoded
            in 8 or 4 bits as they are read, and rest and move so. Those that the files
            have in mxfp4 or nvfp4 do so without one.
        rows, length: shape of the largest batch of all processes, for which room is
            left beside the weights.
        group: the processes that run it together; None: this one alone.

    Raises:
        InfeasibleError: the budgets have no room for the weights.
        ValueError, NotImplementedError, FileNotFoundError: see `initialize`.
    """
    model = model.as_adapted()
    check_class(model)
    model.find_weights()
    model.read_buffers()
    _, mesh = on_devices(config)
    run = running(model, config, rows=rows_of_process(mesh, rows), length=length)
    engine = engine_of(
        run.model,
        run.adapted,
        optax.identity(),
        run.config,
        loss=run.model.running_loss,
        batch=run.batch,
        mesh=mesh,
        group=group,
    )
    engine._programs.execution = run.execution
    return engine


@dataclass(frozen=True)
class Running:
    """A model that runs and is not trained, as `open_model` keeps it.

    Attributes:
        adapted: its weights as they are kept, and what is beside them; None: the
            weights as they are, alone.
        config: budgets and tiers, of a run that trains nothing.
        execution: how it may generate, as the given config says.
        batch: shapes of the batch for which room is left beside the weights.
    """

    model: Model
    adapted: Adapted | None
    config: Config
    execution: str
    batch: dict[str, jax.ShapeDtypeStruct]

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    def planner(self, *, mesh: Mesh, topology: Topology | None) -> Planner:
        """Plans for a machine that may be absent; no weight is needed."""
        config = self.config.told()
        rest = optax.identity(), config
        where = {"mesh": mesh, "topology": topology}
        loss = self.model.running_loss
        return _planner(self.model, self.adapted, *rest, loss=loss, **where)

    def decoder(self, planner: Planner) -> Decoder:
        """The model with its cache, as a function of the arrays of a planner."""
        return decoder_for(self.model, self.adapted, planner)


def running(
    model: Model, config: ConfigSource = None, *, rows: int, length: int
) -> Running:
    """A model as `open_model` runs it; only shapes are known, and no weight is read.

    Raises:
        NotImplementedError: the weights would be kept in few bits below an adapter.
        ValueError: see `adapted_model`.
    """
    loaded = Config.load(config)
    model = model.as_adapted()
    batch, loss = model.running_batch(rows, length), model.running_loss
    adapted, section = None, loaded.adapter
    if model.adapter is not None:
        section = model.adapter.section(model.specs, naming_of(model.module))
    if section is not None:
        section = section.model_copy(update={"lora_dropout": 0.0})
        adapted = adapted_model(model, section, loss=loss, batch=batch)
    if loaded.weight_quantization is not None:
        if section is not None:
            raise NotImplementedError(
                "An adapter is run over the weights that it was trained over, and "
                "weight_quantization (--weight-bits) would change them. Leave it out; "
                "an adapter of adapter.quantize_base has its base in few bits anyway."
            )
    if section is None and (loaded.weight_quantization or model.encodings):
        adapted = adapt(
            loss,
            model.zeros,
            quantization=loaded.weight_quantization,
            encodings=model.encodings,
            batch=batch,
        )
    return Running(model, adapted, loaded.without_training(), loaded.execution, batch)


def decoder_for(
    model: Model,
    adapted: Adapted | None,
    planner: Planner,
    beside: AbstractBeside | None = None,
) -> Decoder:
    """The model with its cache, as a function of the arrays that a planner knows.

    Args:
        beside: see `decoder_of`.
    """
    kept = planner.problem.params
    places = ("",) if adapted is None else (f"{BASE}/", f"{ADAPTER}/")
    paths = (f"{place}{name}" for name in model.specs for place in places)
    # The dtype of the parameters as the model gets them.
    dtype = next(kept[path].compute.dtype for path in paths if path in kept)
    made = decoder_of(model, dtype, beside)
    parts = tuple(prefix for prefix in model.parts if prefix)
    if parts:
        made = replace(made, reads=lambda path: not _is_of(path, parts))
    if adapted is None:
        return made
    all_of = made.apply_all
    apply_all = None if all_of is None else adapted.applied(all_of)
    return replace(made, apply=adapted.applied(made.apply), apply_all=apply_all)


def _is_of(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a key path is of a parameter whose name begins with one of `prefixes`."""
    return any(part.startswith(prefixes) for part in path.split("/"))


def initialize(
    model: Model,
    tx: optax.GradientTransformation,
    config: ConfigSource = None,
    *,
    loss: Callable | None = None,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    batch: Any = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> ModelEngine:
    """Prepare training of a model; see `zinf.initialize`.

    The weights are read when the first batch is known: in parts, each to its tier, so
    the model need not fit in memory. They are rounded to the dtype that they are kept
    in, if that is narrower than the files'.

    Args:
        config: with an `adapter` section, the model's weights are frozen, and adapters
            are trained beside them (see `zinf.adapt`).
        loss: a function with the arguments of `Model.loss`, such as that of
            `zinf.hf.Preference`; by default `model.loss`. It needs `batch`.
        has_aux: it returns `(loss, aux)`.
        rng: for dropout. If the model has any and this is absent, it is key 0.
        batch: `input_ids` and maybe `labels`, `attention_mask`, `position_ids`, each
            (samples, tokens); see `Model.loss`.

    Raises:
        ValueError: as for `zinf.initialize`; or a file lacks a tensor, or has one of
            another shape.
        FileNotFoundError, NotImplementedError: the files are absent, or of a kind that
            zinf does not read; or zinf computes something else than torch in a tiny
            model of the class (`zinf verify`), which is compared once.
    """
    model.check_whole()
    for part in model.parts.values():
        check_class(part)
    config = Config.load(config)
    if rng is None and draws(model, config):
        rng = jax.random.key(0)
    # Buffers that the files have are constants of the loss, which is traced first.
    model.read_buffers()
    adapted = None
    loss = model.loss if loss is None else loss
    if config.adapter is not None:
        model.find_weights()
        adapted = adapted_model(model, config.adapter, loss=loss, batch=batch, rng=rng)
        config = adapted.config(config)
    return engine_of(
        model,
        adapted,
        tx,
        config,
        loss=loss,
        has_aux=has_aux,
        rng=rng,
        batch=batch,
        mesh=mesh,
        group=group,
    )


def engine_of(
    model: Model,
    adapted: Adapted | None,
    tx: optax.GradientTransformation,
    config: Config,
    *,
    loss: Callable | None = None,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    batch: Any,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> ModelEngine:
    """An engine for a config whose adapter section is done."""
    where = {"mesh": mesh, "group": group, "has_aux": has_aux}
    planner = _planner(model, adapted, tx, config, loss=loss, rng=rng, **where)
    engine = ModelEngine(measuring(planner), rng)
    engine._model, engine._adapted = model, adapted
    if batch is not None:
        engine.prepare(batch)
    return engine


def _planner(
    model: Model,
    adapted: Adapted | None,
    tx: optax.GradientTransformation,
    config: Config,
    *,
    loss: Callable | None = None,
    **named: Any,
) -> Planner:
    if adapted is None:
        config = freezing(config, model)
        return make_planner(loss or model.loss, model.zeros, tx, config, **named)
    evaluates = adapted.eval_loss_fn
    rest = adapted.params, tx, config
    return make_planner(adapted.loss_fn, *rest, eval_loss_fn=evaluates, **named)


def freezing(config: Config, model: Model) -> Config:
    """A copy of a config that also freezes the parameters that torch does not train."""
    frozen = (*config.frozen, *map(escape, model.untrained))
    return config.model_copy(update={"frozen": frozen})


def draws(model: Model, config: Config) -> bool:
    """Whether training draws random numbers, for the model or for its adapters."""
    has_dropout = config.adapter is not None and config.adapter.lora_dropout > 0
    return model.is_random or has_dropout


def adapted_model(
    model: Model,
    adapter: Adapter,
    *,
    loss: Callable | None = None,
    batch: Any = None,
    rng: jax.Array | None = None,
) -> Adapted:
    """The model with adapters, of which only shapes are known.

    Args:
        loss, batch: as for `initialize`.

    Raises:
        ValueError: see `zinf.adapt.lora` and, for `adapter.begin_from`, `load_adapter`.
    """
    if batch is None:
        # Which weights are multiplied by activations does not depend on the batch.
        batch = {"input_ids": jax.ShapeDtypeStruct((1, TRACED_TOKENS), "int32")}
    if model.new_modules:
        saved = tuple(dict.fromkeys([*adapter.modules_to_save, *model.new_modules]))
        adapter = adapter.model_copy(update={"modules_to_save": saved})
    if model.without_adapters:
        adapter = _excluding(adapter, model.without_adapters)
    loss = model.loss if loss is None else loss
    named = {"encodings": model.encodings, "batch": batch, "rng": rng}
    found = adapt(loss, model.zeros, adapter, **named)
    naming = naming_of(model.module)
    lengths = [p for p, x in found.targets.items() if x.is_dora and p in naming.tied]
    if lengths:
        names = " and ".join(naming.of(lengths[0]))
        raise NotImplementedError(
            f"adapter.use_dora would give one weight two lengths: {names} are tied, "
            "and its columns are words in one place and hidden dims in the other. "
            "Leave it out of target_modules, or use_dora."
        )
    if adapter.begin_from is not None:
        _check_parting(model, adapter.begin_from, naming)
        found = load_adapter(found, adapter.begin_from, naming=naming)
    return found


def _excluding(adapter: Adapter, names: Sequence[str]) -> Adapter:
    """The settings, so that parameters get no adapters."""
    excluded = adapter.exclude_modules
    if isinstance(excluded, str):
        both = "|".join((f"(?:{excluded})", *map(re.escape, names)))
        return adapter.model_copy(update={"exclude_modules": both})
    return adapter.model_copy(update={"exclude_modules": (*excluded, *names)})


def _check_parting(model: Model, folder: Path, naming: Naming) -> None:
    """Refuse an adapter that changes a tied weight in one of its places alone."""
    if not (folder / ADAPTER_FILE).is_file():
        return  # `load_adapter` says what is absent.
    parting = SavedAdapter(folder, {}).parting(naming)
    if parting:
        raise ValueError(
            f"The adapter in {folder} parts a tied weight of {model.name}: {parting}, "
            "and here the two are one weight (tie_word_embeddings). Run the adapter as "
            "it is (zinf generate, evaluate), or train on a base whose files have both "
            "weights and whose config.json says tie_word_embeddings: false."
        )
