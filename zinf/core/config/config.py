"""A config from a file, a mapping or another config, checked as a whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from zinf.core.config.arguments import TOTAL_STEPS, Key, chosen_values, fill
from zinf.core.config.deepspeed import ActivationCheckpointing
from zinf.core.config.grouping import grouping
from zinf.core.config.load import override, raw_config
from zinf.core.config.messages import ConfigError, Notice, Problem, without_effect
from zinf.core.config.rules import RULES
from zinf.core.config.section import Violation
from zinf.core.config.settings import Settings
from zinf.core.config.stand_in import with_stand_in
from zinf.core.config.validate import overlaps, validate


class Config(Settings):
    """A complete, checked config: DeepSpeed's keys and zinf's own.

    Make one with `Config.load`. An empty config leaves everything automatic.
    """

    _chosen: dict[Key, Any] = PrivateAttr(default_factory=dict)
    _not_done: tuple[Notice, ...] = PrivateAttr(default=())
    _is_told: bool = PrivateAttr(default=False)
    _origin: "Origin" = PrivateAttr(default_factory=lambda: Origin())

    @classmethod
    def load(
        cls,
        source: "Mapping[str, Any] | str | Path | Config | None" = None,
        overrides: Sequence[str] = (),
        *,
        world_size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        ignore_unsupported: bool | None = None,
    ) -> "Config":
        """The config in `source`, with `overrides` ("a.b=value") on top.

        Args:
            source: a mapping, the path of a YAML or JSON file, a config, or None for
                an empty one.
            overrides: values are read as YAML; a later one wins.
            world_size: data-parallel devices, for batch-size arithmetic; by default
                those that a given config was loaded for, or that `mesh` asks for, or 1
                if the mesh takes all devices. `on_devices` counts those.
            arguments: what fills in keys that are "auto", by the names of
                `transformers.TrainingArguments` (`learning_rate`, `max_grad_norm`,
                `max_steps`, ...), as its `to_dict` gives them. Those that are not given
                have that class's defaults, and `chosen` lists them.
            ignore_unsupported: replaces the key of that name.

        Raises:
            ConfigError: a ValueError that names every unknown key, wrong value and
                impossible combination, with its full path and what is allowed there.
            FileNotFoundError: `source` names no file.
            ValueError: the file or an override cannot be read.
        """
        if isinstance(source, Config):
            world_size = source._world_size if world_size is None else world_size
            if not overrides and world_size == source._world_size:
                return source
        raw = override(raw_config(source), overrides)
        if ignore_unsupported is not None:
            raw["ignore_unsupported"] = ignore_unsupported
        if world_size is None:
            world_size = grouping(raw).num_data_parallel or 1
        found = check_raw(raw, world_size=world_size, arguments=arguments)
        if found.config is None:
            name = str(source) if isinstance(source, str | Path) else "config"
            raise ConfigError(name, found.problems)
        if isinstance(source, Config):
            found.config._take_over(source, overrides)
        elif isinstance(source, str | Path):
            folder = Path(source).expanduser().absolute().parent
            found.config._origin = Origin(folder)
        return found.config

    def _take_over(self, source: "Config", overrides: Sequence[str]) -> None:
        """Copies from the config that this one was made from what no key holds."""
        keys = (text.partition("=")[0].strip() for text in overrides)
        changed = [tuple(key.split(".")) for key in keys]
        for key, value in source._chosen.items():
            if not overlaps(key, changed):
                self._chosen.setdefault(key, value)
        kept = [n for n in source._not_done if not overlaps(n.path, changed)]
        self._not_done = tuple(dict.fromkeys([*kept, *self._not_done]))
        self._origin = source._origin

    def told(self) -> "Config":
        """A copy whose notices `zinf.initialize` does not log, as they were printed."""
        told = self.model_copy()
        told._is_told = True
        return told

    def folders_of_modules(self) -> tuple[Path, ...]:
        """Where the module of `model.function` is looked for, in this order.

        The folder of the file that this config was read from, and the current folder.
        """
        folders = [self._origin.folder, Path.cwd()]
        return tuple(dict.fromkeys(folder for folder in folders if folder is not None))

    def without_training(self) -> "Config":
        """A copy for running a model: all is frozen, and no step is taken.

        Budgets, folders, tiers of parameters and dtypes stay. Left out is what changes
        the parameters first: an adapter, and weights in few bits.
        """
        nothing = dict.fromkeys(
            (
                "adapter",
                "weight_quantization",
                "gradient_clipping",
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
        )
        changed = {
            "frozen": ("*",),
            "execution": "streamed",
            "activation_checkpointing": ActivationCheckpointing(),
        }
        return self.model_copy(update=nothing | changed)

    @property
    def is_told(self) -> bool:
        """Whether a user has been shown the notices."""
        return self._is_told

    @property
    def chosen(self) -> dict[Key, Any]:
        """Keys that were "auto" and that no argument gave, with their values."""
        return dict(self._chosen)

    @property
    def not_done(self) -> tuple[Notice, ...]:
        """Keys that ask for what zinf does not do: left out, or without effect."""
        return self._not_done

    def model_post_init(self, context: Any) -> None:
        if isinstance(context, Mapping):
            self._world_size = context.get("world_size", 1)

    def violations(self) -> Iterator[Violation]:
        for rule in RULES:
            yield from rule(self)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a config was read from. Configs are equal wherever that is.

    Attributes:
        folder: of its file; None: it was no file.
    """

    folder: Path | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """A config, or everything that is wrong with one."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_raw(
    raw: Mapping[str, Any],
    *,
    world_size: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> CheckedConfig:
    """Makes a config of keys and values.

    Fills in "auto", leaves out unsupported keys if `ignore_unsupported` is true, and
    checks the rest.
    """
    filled = fill(raw, arguments)
    ignores = raw.get("ignore_unsupported") is True
    asked, stand_ins = with_stand_in(filled.raw)
    checked = validate(
        Config,
        asked if ignores else filled.raw,
        context={"world_size": world_size},
        ignores_unsupported=ignores,
    )
    config = checked.config
    if config is None:
        replaceable = [notice.path for notice in stand_ins]
        problems = [
            replace(p, is_unsupported=True) if p.path in replaceable else p
            for p in checked.problems
        ]
        return CheckedConfig(None, tuple(problems))
    config._chosen = {
        key: value
        for key, value in chosen_values(config, raw)
        if key not in filled.given
    }
    if TOTAL_STEPS in filled.open and "steps" not in config.run.model_fields_set:
        config._chosen[TOTAL_STEPS] = config.run.steps
    left_out = [Notice(p.path, f"left out. {p.text}") for p in checked.left_out]
    unsupported = (*stand_ins, *left_out) if ignores else ()
    config._not_done = (*unsupported, *without_effect(filled.raw, Config))
    return CheckedConfig(config, ())
