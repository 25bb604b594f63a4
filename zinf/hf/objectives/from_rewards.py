"""What objectives have in common whose data the model draws and rewards judge.

Lines have a `prompt` (or `messages`), and columns for the rewards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax

from zinf.core.config import Config
from zinf.core.engine.named import MASTER
from zinf.core.optim.average import REFERENCE
from zinf.core.rollouts import Prompt, Rewards
from zinf.core.rollouts.asking import Function
from zinf.core.rollouts.calls import Reward
from zinf.core.rollouts.environment import Environment
from zinf.core.rollouts.functions import (
    code_digest,
    load_functions,
    place_of_model,
)
from zinf.core.rollouts.rollouts import AbstractRollouts
from zinf.core.rollouts.sizes import batch_spec, check_room
from zinf.data.configured import batch_size
from zinf.hf.completion import end_tokens, prompt_tokens
from zinf.hf.engine import ModelEngine
from zinf.hf.folder import weights_digest
from zinf.hf.images.model import ImageModel, check_pieces, room_of
from zinf.hf.images.prompts import ImagesOfPrompts, pieces_of
from zinf.hf.images.reader import ImageReader
from zinf.hf.judge import Judge, digest_of_rewards, judges_among, load_rewards
from zinf.hf.model import Batch, Model, Params, load
from zinf.hf.objectives import objective_of
from zinf.hf.objectives.objective import Drawing, Objective, Say, Spec, causal_model
from zinf.hf.records import records
from zinf.hf.reply import check_template, reply_tokens

TEXTS = "completions.jsonl"
OWN_KEYS = ("prompt", "messages")
# Keys of grpo that an environment reads.
OF_ENVIRONMENT = ("environment_timeout", "max_tool_calling_iterations")
Kind = TypeVar("Kind", bound=AbstractRollouts)


def drawing_objective(
    kind: type[AbstractRollouts],
    *,
    loss: Callable[[Model, Config], Callable],
    names: Callable[[Config], tuple[str, ...]],
    drawn: Callable[[Config], int],
    model: Callable[[Config], Model] = causal_model,
    by: Callable[[Any, ModelEngine, Config], Any] | None = None,
    asked: Callable[[Any], Mapping[str, Callable]] = lambda model: {},
    teacher: Callable[[Model, Config], Model | None] = lambda policy, config: None,
) -> Objective:
    """The record of an objective.

    Args:
        kind: of batches.
        loss, model: see `Objective`. The loss returns metrics too.
        names: the leaves (rows, tokens - 1) of a batch.
        drawn, asked, teacher: see `Drawing`.
        by: see `Drawing`; None: `drawn_by`.
    """

    def spec(config: Config, rows: int, length: int) -> Spec:
        return batch_spec(names(config), rows, length)

    return Objective(
        loss=loss,
        batch_spec=spec,
        rows=_rows,
        model=model,
        settings_of_data=_settings,
        has_aux=True,
        drawing=Drawing(
            kind,
            partial(_dataset, kind),
            _num_samples,
            drawn,
            by or drawn_by,
            asked,
            _digests,
            has_copy,
            _judges,
            teacher,
        ),
    )


def scored(model: Model, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a batch that a model reads."""
    return {name: batch[name] for name in model.scored_leaves}


def read_prompts(
    model: Model, lines: Iterable[tuple[Any, str]], folder: Path | None = None
) -> tuple[Prompt, ...]:
    """Prompts of records, each given with its place, for messages.

    Args:
        folder: from which paths of images begin; None: the current one.

    Raises:
        ValueError: a record has no prompt, or a conversation that has its answer, or an
            image that is missing or that the model does not read.
    """
    reader = ImageReader(model) if isinstance(model, ImageModel) else None
    return tuple(_prompt(model, reader, x, where, folder) for x, where in lines)


def _prompt(
    model: Model,
    reader: ImageReader | None,
    line: Any,
    where: str,
    folder: Path | None,
) -> Prompt:
    columns: dict[str, Any] = {}
    if isinstance(line, Mapping):
        line = {name: x for name, x in line.items() if x is not None}
        columns = {name: x for name, x in line.items() if name not in OWN_KEYS}
        if isinstance(line.get("prompt"), list):
            line = {**line, "messages": line["prompt"]}
            del line["prompt"]
    images: tuple[bytes, ...] = ()
    if reader is None:
        tokens = prompt_tokens(model, line, where, chat=False)
    else:
        line, images, seen = reader.read(line, where, folder)
        layout = reader.layout(seen)
        tokens = prompt_tokens(model, line, where, chat=False, tokenizer=layout)
        reader.row(seen, tokens, where)  # It refuses images that do not fit the text.
    shown = line.get("messages", line.get("prompt"))
    if isinstance(shown, list) and shown[-1].get("role") == "assistant":
        raise ValueError(
            f"{where}: the conversation ends with what the assistant says, which the "
            "model is to write. Leave the last message out."
        )
    return Prompt(tokens, shown, columns, where, images)


def prompts_of(model: Model, config: Config) -> tuple[Prompt, ...]:
    """The prompts of a config's files.

    Raises:
        FileNotFoundError, ValueError: a file or a line is wrong.
    """
    paths = config.data.paths
    if isinstance(paths, str):
        raise ValueError(
            "data.paths names no file. Name files of JSON lines with prompt or "
            "messages there."
        )
    changed = tuple((path, path.stat().st_mtime_ns) for path in paths)
    return _prompts_of(model, changed)


@lru_cache(maxsize=1)
def _prompts_of(
    model: Model, changed: tuple[tuple[Path, int], ...]
) -> tuple[Prompt, ...]:
    read = (read_prompts(model, records(path), path.parent) for path, _ in changed)
    prompts = tuple(prompt for some in read for prompt in some)
    if not prompts:
        names = ", ".join(str(path) for path, _ in changed)
        raise ValueError(f"{names}: there is no prompt to read.")
    return prompts


def rewards_of(config: Config) -> tuple[Reward, ...]:
    """The rewards that a config names.

    Raises:
        ValueError, FileNotFoundError, OSError, NotImplementedError: see `load_rewards`.
    """
    return load_rewards(config.completions.rewards, config.folders_of_modules())


def longest(prompts: Sequence[Prompt], config: Config) -> int:
    """Tokens of a row that has room for all prompts and their completions."""
    most = max((len(p.tokens) for p in prompts), default=1)
    return most + config.completions.max_new_tokens


def rollouts_of(
    kind: type[Kind],
    model: Model,
    config: Config,
    prompts: Sequence[Prompt],
    functions: Sequence[Reward],
    *,
    length: int,
    environment: Function | None = None,
) -> Kind:
    """The batches of a config, which an engine is to draw.

    Args:
        environment: what replies to turns of the model; None: a completion is one.

    Raises:
        ValueError: see `AbstractRollouts` and `Rewards`.
        NotImplementedError: see `check_reference`.
    """
    check_reference(config)
    settings, tokenizer = config.completions, model.tokenizer
    weights, limit = settings.reward_weights, settings.reward_timeout
    if not functions and _teacher_name(config) is not None:
        functions = (no_reward,)
    rewards = Rewards(functions, weights, timeout=limit)
    return kind(
        prompts,
        rewards,
        settings,
        length=length,
        batch_size=batch_size(config),
        num_microbatches=config.num_microbatches,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        eos_token_ids=end_tokens(model),
        padding=model.padding,
        seed=config.data.seed,
        environment=_environment(model, config, prompts, environment),
        texts=config.run.output / TEXTS,
        beside=_beside(model, config, prompts, length),
    )


def _beside(
    model: Model, config: Config, prompts: Sequence[Prompt], length: int
) -> ImagesOfPrompts | None:
    if not isinstance(model, ImageModel):
        return None
    room = room_of(model, config.data.images)
    for prompt, pieces in zip(prompts, pieces_of(model, prompts), strict=True):
        check_pieces(model, pieces, room, prompt.where)
    return ImagesOfPrompts(model, room=room, length=length)


def no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of what a teacher alone judges."""
    del columns
    return [0.0] * len(completions)


def _teacher_name(config: Config) -> str | None:
    return config.grpo.teacher if config.data.objective == "grpo" else None


def environment_of(
    config: Config, given: Function | str | None = None
) -> Function | None:
    """The environment of a config, or what is given in its place, which may be a name.

    Raises:
        ValueError: see `load_functions`.
    """
    name = config.grpo.environment if given is None else given
    if name is None or not isinstance(name, str):
        return name
    folders = config.folders_of_modules()
    (found,) = load_functions([name], folders, kind="environment")
    return found


def _environment(
    model: Model,
    config: Config,
    prompts: Sequence[Prompt],
    function: Function | None,
) -> Environment | None:
    settings = config.grpo
    if function is None:
        given = [key for key in OF_ENVIRONMENT if settings.asks(key)]
        if not given:
            return None
        raise ValueError(
            f"grpo.{given[0]} is {getattr(settings, given[0])}, and there is no "
            "environment that replies. Name one (grpo.environment), or leave it out."
        )
    if any(not isinstance(p.shown, str) for p in prompts):
        check_template(model)
    tokens = partial(reply_tokens, model)
    limits = (getattr(settings, key) for key in OF_ENVIRONMENT)
    return Environment(function, tokens, *limits)


def check_reference(config: Config) -> None:
    """Refuse a reference that is not the frozen base of the adapters.

    Raises:
        NotImplementedError: there is a factor of the divergence, and the adapters begin
            from saved ones, or modules are trained whole beside them.
    """
    adapter, settings = config.adapter, config.completions
    if not settings.penalty or adapter is None:
        return
    keys = ("begin_from", "modules_to_save")
    found = [key for key in keys if getattr(adapter, key)]
    if found:
        key = f"{settings.KEY}.{settings.PENALTY}"
        raise NotImplementedError(
            f"{key} is {settings.penalty}, so a reference is needed, which with "
            f"adapters is their frozen base, and adapter.{found[0]} makes training "
            f"begin from another model. Leave it out, or set {key} to 0."
        )


def has_copy(config: Config) -> bool:
    """Whether the reference is a second copy of the model; see `Reference`.

    One that moves is among the state of the optimizer.
    """
    has_own = config.adapter is not None or config.syncs_reference
    return config.completions.penalty > 0 and not has_own


def drawn_by(rollouts: Kind, engine: ModelEngine, config: Config) -> Kind:
    """Rollouts that an engine draws, with the reference of a config.

    Reward models among the rewards are those beside the engine.
    """
    judges = engine.judges
    if not config.completions.penalty or engine.reference is not None:
        return rollouts.of(engine, engine.reference, judges)
    adapted, kind = engine.adapted, REFERENCE
    temperature = config.completions.temperature
    model = engine.model
    function: Callable = Scores(model, temperature)
    if adapted is not None:
        reads = model.parts[""].specs
        function, kind = adapted.unchanged(function, reads=reads), MASTER

    def reference(batch: Mapping[str, Any]) -> Any:
        how = {"num_microbatches": config.num_microbatches, "kind": kind}
        return engine.apply(function, scored(model, batch), **how)

    return rollouts.of(engine, reference, judges)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of tokens, as a function of parameters and a batch."""

    model: Model
    temperature: float

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        return self.model.token_log_probabilities(
            params, batch, temperature=self.temperature
        )


def _rows(samples: Any, model: Model, config: Config) -> Any:
    raise NotImplementedError(
        f"With data.objective {config.data.objective} the model draws what it is "
        "trained on, so there are no samples to read."
    )


def _dataset(kind: type[Kind], model: Model, config: Config) -> Kind:
    return rollouts_of(
        kind,
        model,
        config,
        _kept(model, config),
        rewards_of(config),
        length=_length(model, config),
        environment=environment_of(config),
    )


def _length(model: Model, config: Config) -> int:
    """Tokens of a row that are not more than the model was made for."""
    lengths = config.sequence_length, model.max_length
    return min(x for x in lengths if x is not None)


def _kept(model: Model, config: Config) -> tuple[Prompt, ...]:
    """The prompts of a config, without those that it drops for want of room."""
    prompts = prompts_of(model, config)
    if config.data.treatment_of_long != "drop":
        return prompts
    most = _length(model, config) - config.completions.max_new_tokens
    return tuple(p for p in prompts if len(p.tokens) <= most)


def _settings(config: Config, say: Say) -> dict[str, Any]:
    """The length of a row, unless the config says it."""
    if config.data.sequence_length is not None:
        return {}
    model = objective_of(config).model(config)
    prompts = prompts_of(model, config)
    length = longest(prompts, config)
    if model.max_length is not None and length > model.max_length:
        if config.data.treatment_of_long == "drop":
            return {"sequence_length": model.max_length}
        first = max(prompts, key=lambda p: len(p.tokens))
        check_room(first, config.completions, model.max_length)
    return {"sequence_length": length}


def _num_samples(model: Model, config: Config) -> int:
    settings = config.completions
    count = len(_kept(model, config)) * settings.group_size
    return count * settings.num_uses


def _digests(config: Config) -> dict[str, str]:
    settings, folders = config.completions, config.folders_of_modules()
    digest = digest_of_rewards(settings.rewards, folders)
    found = {f"{settings.KEY}.rewards.content": digest}
    teacher = _teacher_name(config)
    if teacher is not None:
        place = Path(place_of_model(teacher, folders) or teacher)
        found["grpo.teacher.weights"] = weights_digest(load(str(place)).folder)
    environment = config.grpo.environment
    if environment is not None:
        found["grpo.environment.content"] = code_digest([environment], folders)
    return found


def _judges(config: Config) -> tuple[Judge, ...]:
    # A plan may have no prompts; their images are all that reward models ask of them.
    has_images = config.data.images is not None
    model = objective_of(config).model(config)
    prompts = _kept(model, config) if has_images else ()
    return judges_among(rewards_of(config), prompts)
