"""From rewards: GRPO and RLOO. Lines have a `prompt` (or `messages`), and columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from zinf.core.config import Config
from zinf.core.rl import PolicyLoss
from zinf.core.rollouts import Prompt, Rewards, Rollouts, policy_loss
from zinf.core.rollouts.calls import Reward
from zinf.core.rollouts.sizes import Sizes, batch_names, batch_spec, check_room
from zinf.data.configured import batch_size
from zinf.hf.completion import end_tokens, prompt_tokens
from zinf.hf.engine import ModelEngine
from zinf.hf.judge import Judge, digest_of_rewards, judges_among, load_rewards
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives.objective import Drawing, Objective, Spec
from zinf.hf.records import records

TEXTS = "completions.jsonl"
OWN_KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class FromRewards:
    """The loss of a model that learns from the advantages of what it wrote.

    Attributes:
        policy: the loss of log-probabilities.
        temperature: that of drawing; logits are divided by it.
    """

    model: Model
    policy: PolicyLoss
    temperature: float = 1.0

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Any:
        """`(loss, metrics)`, see `PolicyLoss`.

        Args:
            batch: of `Rollouts`: `input_ids` and `labels` (rows, tokens), and what
                `PolicyLoss` reads.
        """
        logps = self.model.token_log_probabilities(
            params, scored(batch), *key, train=train, temperature=self.temperature
        )
        return self.policy(logps, batch)


def scored(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a batch that a model reads."""
    return {name: batch[name] for name in ("input_ids", "labels")}


def read_prompts(model: Model, lines: Iterable[tuple[Any, str]]) -> tuple[Prompt, ...]:
    """Prompts of records, each given with its place, for messages.

    Raises:
        ValueError: a record has no prompt, or a conversation that has its answer.
    """
    return tuple(_prompt(model, line, where) for line, where in lines)


def _prompt(model: Model, line: Any, where: str) -> Prompt:
    columns: dict[str, Any] = {}
    if isinstance(line, Mapping):
        line = {name: x for name, x in line.items() if x is not None}
        columns = {name: x for name, x in line.items() if name not in OWN_KEYS}
        if isinstance(line.get("prompt"), list):
            line = {**line, "messages": line["prompt"]}
            del line["prompt"]
    tokens = prompt_tokens(model, line, where, chat=False)
    shown = line.get("messages", line.get("prompt"))
    if isinstance(shown, list) and shown[-1].get("role") == "assistant":
        raise ValueError(
            f"{where}: the conversation ends with what the assistant says, which the "
            "model is to write. Leave the last message out."
        )
    return Prompt(tokens, shown, columns, where)


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
    lines = (line for path, _ in changed for line in records(path))
    prompts = read_prompts(model, lines)
    if not prompts:
        names = ", ".join(str(path) for path, _ in changed)
        raise ValueError(f"{names}: there is no prompt to read.")
    return prompts


def sizes_of(config: Config) -> Sizes:
    """How many completions a config has drawn at once.

    Raises:
        ValueError: they do not divide each other.
    """
    count = config.num_microbatches
    return Sizes.of(config.grpo, batch=batch_size(config), num_microbatches=count)


def longest(prompts: Sequence[Prompt], config: Config) -> int:
    """Tokens of a row that has room for all prompts and their completions."""
    most = max((len(p.tokens) for p in prompts), default=1)
    return most + config.grpo.max_completion_length


def rollouts_of(
    model: Model,
    config: Config,
    prompts: Sequence[Prompt],
    functions: Sequence[Reward],
    *,
    length: int,
) -> Rollouts:
    """The batches of a config, which an engine is to draw.

    Raises:
        ValueError: see `Rollouts` and `Rewards`.
        NotImplementedError: see `check_reference`.
    """
    check_reference(config)
    settings, tokenizer = config.grpo, model.tokenizer
    weights, limit = settings.reward_weights, settings.reward_timeout
    rewards = Rewards(functions, weights, timeout=limit)
    return Rollouts(
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
        texts=config.run.output / TEXTS,
    )


def check_reference(config: Config) -> None:
    """Refuse a reference that is not the frozen base of the adapters.

    Raises:
        NotImplementedError: `grpo.beta` is set, and the adapters begin from saved ones,
            or modules are trained whole beside them.
    """
    adapter, beta = config.adapter, config.grpo.beta
    if not beta or adapter is None:
        return
    keys = ("begin_from", "modules_to_save")
    found = [key for key in keys if getattr(adapter, key)]
    if found:
        raise NotImplementedError(
            f"grpo.beta is {beta}, so a reference is needed, which with adapters is "
            f"their frozen base, and adapter.{found[0]} makes training begin from "
            "another model. Leave it out, or set grpo.beta to 0."
        )


def has_copy(config: Config) -> bool:
    """Whether the reference is a second copy of the model; see `Reference`."""
    return config.grpo.beta > 0 and config.adapter is None


def drawn_by(rollouts: Rollouts, engine: ModelEngine, config: Config) -> Rollouts:
    """Rollouts that an engine draws, with the model as it began as the reference.

    Reward models among the rewards are those beside the engine.
    """
    judges = engine.judges
    if not config.grpo.beta or engine.reference is not None:
        return rollouts.of(engine, engine.reference, judges)
    adapted = engine.adapted
    assert adapted is not None, "see `has_copy`"
    temperature = config.grpo.temperature
    function = adapted.unchanged(_Scores(engine.model, temperature))

    def reference(batch: Mapping[str, Any]) -> Any:
        count = config.num_microbatches
        return engine.apply(function, scored(batch), num_microbatches=count)

    return rollouts.of(engine, reference, judges)


@dataclass(frozen=True)
class _Scores:
    """Log-probabilities of tokens, as a function of parameters and a batch."""

    model: Model
    temperature: float

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        return self.model.token_log_probabilities(
            params, batch, temperature=self.temperature
        )


def _loss(model: Model, config: Config) -> Callable:
    settings = config.grpo
    return FromRewards(model, policy_loss(settings), settings.temperature).loss


def _spec(config: Config, rows: int, length: int) -> Spec:
    return batch_spec(batch_names(config.grpo, sizes_of(config)), rows, length)


def _rows(samples: Any, model: Model, config: Config) -> Any:
    raise NotImplementedError(
        "With data.objective grpo the model draws what it is trained on, so there are "
        "no samples to read."
    )


def _dataset(model: Model, config: Config) -> Rollouts:
    names, folders = config.grpo.rewards, config.folders_of_modules()
    functions = load_rewards(names, folders)
    prompts, length = prompts_of(model, config), config.sequence_length
    if model.max_length is not None:
        length = min(length, model.max_length)
    if config.data.treatment_of_long == "drop":
        most = length - config.grpo.max_completion_length
        prompts = tuple(p for p in prompts if len(p.tokens) <= most)
    return rollouts_of(model, config, prompts, functions, length=length)


def _settings(model: Model, config: Config) -> dict[str, Any]:
    """The length of a row, unless the config says it."""
    if config.data.sequence_length is not None:
        return {}
    prompts = prompts_of(model, config)
    length = longest(prompts, config)
    if model.max_length is not None and length > model.max_length:
        if config.data.treatment_of_long == "drop":
            return {"sequence_length": model.max_length}
        first = max(prompts, key=lambda p: len(p.tokens))
        check_room(first, config.grpo.max_completion_length, model.max_length)
    return {"sequence_length": length}


def _num_samples(model: Model, config: Config) -> int:
    settings = config.grpo
    count = len(prompts_of(model, config)) * settings.num_generations
    return count * settings.num_iterations


def _digests(config: Config) -> dict[str, str]:
    names, folders = config.grpo.rewards, config.folders_of_modules()
    return {"grpo.rewards.content": digest_of_rewards(names, folders)}


def _judges(config: Config) -> tuple[Judge, ...]:
    return judges_among(load_rewards(config.grpo.rewards, config.folders_of_modules()))


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=_spec,
    rows=_rows,
    settings_of_data=_settings,
    has_aux=True,
    drawing=Drawing(_dataset, _num_samples, drawn_by, _digests, has_copy, _judges),
)
