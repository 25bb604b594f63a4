"""Fills in values that are "auto".

Config files for Hugging Face's `Trainer` write "auto" where the trainer's arguments
decide. The table below says which argument that is, and its default. A key outside the
table that is "auto" counts as absent.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from zinf.core.config.section import Section
from zinf.core.config.status import AUTO, AUTO_WORD

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A key, and the arguments that its value comes from.

    Attributes:
        names: arguments of `transformers.TrainingArguments`; several make a list.
        default: the value if no argument is given; None leaves the key absent.
    """

    key: Key
    names: tuple[str, ...]
    default: Any

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """The value that the arguments give, or None if none of them is given."""
        given = [arguments.get(name) for name in self.names]
        if all(value is None for value in given):
            return None
        if len(given) == 1:
            return given[0]
        pairs = zip(given, self.default, strict=True)
        return [usual if value is None else value for value, usual in pairs]


OPTIMIZER, SCHEDULER = ("optimizer", "params"), ("scheduler", "params")
LR, TOTAL_STEPS = (*OPTIMIZER, "lr"), (*SCHEDULER, "total_num_steps")
ROWS = (
    Row(("train_micro_batch_size_per_gpu",), ("per_device_train_batch_size",), None),
    # Absent, it follows from the other sizes of a batch, and is 1 if none is given.
    Row(("gradient_accumulation_steps",), ("gradient_accumulation_steps",), None),
    Row(("gradient_clipping",), ("max_grad_norm",), 1.0),
    Row(LR, ("learning_rate",), 5e-5),
    Row((*OPTIMIZER, "betas"), ("adam_beta1", "adam_beta2"), (0.9, 0.999)),
    Row((*OPTIMIZER, "eps"), ("adam_epsilon",), 1e-8),
    Row((*OPTIMIZER, "weight_decay"), ("weight_decay",), 0.0),
    Row((*SCHEDULER, "warmup_min_lr"), (), 0.0),
    Row((*SCHEDULER, "warmup_max_lr"), ("learning_rate",), None),
    Row((*SCHEDULER, "warmup_num_steps"), ("warmup_steps",), 0),
    Row(TOTAL_STEPS, ("max_steps",), None),
    Row(("bf16", "enabled"), ("bf16",), False),
    Row(("bfloat16", "enabled"), ("bf16",), False),
    Row(("fp16", "enabled"), ("fp16",), False),
)
# Keys of schedulers that replace the optimizer's learning rate.
SCHEDULED = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")


@dataclass(frozen=True, slots=True)
class Filled:
    """The keys and values of a config after its "auto" were filled in.

    Attributes:
        raw: the keys and values, with "auto" replaced for every key in the table.
        given: the keys whose value came from an argument or from another key.
        open: the keys that have neither a value nor a default.
    """

    raw: dict[str, Any]
    given: frozenset[Key]
    open: frozenset[Key]


def fill(raw: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Filled:
    """Replaces "auto" by a trainer's arguments, or by the defaults of those arguments.

    Args:
        raw: keys and values, not yet checked.
        arguments: by the names of `transformers.TrainingArguments`. Other names, and
            arguments that are None, are not read.
    """
    given = _steps_resolved(dict(arguments or {}), raw)
    filled, keys, left = copy.deepcopy(dict(raw)), set(), set()
    for row in ROWS:
        section = section_at(filled, row.key[:-1])
        name = row.key[-1]
        if section is None or section.get(name) != AUTO_WORD:
            continue
        value = row.value(given)
        if value is None and row.key == LR:
            value = _scheduled_lr(filled)
        if value is None:
            value = row.default
        else:
            keys.add(row.key)
        if value is None:
            left.add(row.key)
        if value is not None or row.key == TOTAL_STEPS:
            # A null total_num_steps means run.steps; an absent one is refused.
            section[name] = list(value) if isinstance(value, tuple) else value
    return Filled(filled, frozenset(keys), frozenset(left))


def chosen_values(
    section: Section, raw: Mapping[str, Any], above: Key = ()
) -> Iterator[tuple[Key, Any]]:
    """Keys that are "auto" in the raw config, and the values they have now.

    Keys that the plan decides are left out: they have no value yet.
    """
    for key, value in raw.items():
        field = type(section).model_fields.get(key)
        if field is None:
            continue
        found = getattr(section, key)
        if isinstance(found, Section) and isinstance(value, Mapping):
            yield from chosen_values(found, value, (*above, key))
        elif value == AUTO_WORD and found is not None and AUTO in field.metadata:
            yield (*above, key), found


def default_values(raw: Mapping[str, Any]) -> dict[Key, Any]:
    """Keys of the table that are "auto", and the values they get without arguments."""
    filled, found = fill(raw).raw, dict[Key, Any]()
    for row in ROWS:
        *above, name = row.key
        before = section_at(raw, tuple(above)) or {}
        value = (section_at(filled, tuple(above)) or {}).get(name)
        if before.get(name) == AUTO_WORD and value not in (None, AUTO_WORD):
            found[row.key] = value
    return found


def section_at(raw: Mapping[str, Any], path: Key) -> dict[str, Any] | None:
    """The mapping at a path, if there is one."""
    value: Any = raw
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else None


def _steps_resolved(given: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without a max_steps of -1, and warmup_ratio as warmup_steps."""
    if (given.get("max_steps") or 0) <= 0:
        given.pop("max_steps", None)
    run = section_at(raw, ("run",)) or {}
    total, ratio = given.get("max_steps", run.get("steps")), given.get("warmup_ratio")
    if not given.get("warmup_steps") and ratio and isinstance(total, int):
        given["warmup_steps"] = ceil(total * ratio)
    return given


def _scheduled_lr(raw: Mapping[str, Any]) -> float | None:
    """The learning rate that the scheduler sets, or None."""
    params = section_at(raw, SCHEDULER) or {}
    rates = (params.get(key) for key in SCHEDULED)
    return next((rate for rate in rates if isinstance(rate, int | float)), None)
