"""Keys that no code reads: known, told of or refused only where they ask."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.config.cases import sections
from zinf.core.config import (
    Config,
    ConfigError,
    Status,
    grouping,
    notices,
    opaque,
    report,
)
from zinf.core.config.unread import TABLE, Unread

ODD_VALUES = (None, "auto", True, False, 0, -1, 8, 1e9, "x", [1], {})
# Of DeepSpeed 0.19.6.
TOP_LEVEL = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer
scheduler communication_data_type prescale_gradients gradient_predivide_factor
sparse_gradients fp16 bf16 amp gradient_clipping zero_optimization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
wall_clock_breakdown dump_state flops_profiler activation_checkpointing sparse_attention
data_efficiency curriculum_learning tensorboard wandb csv_monitor comet elasticity
comms_logger compression_training checkpoint data_types aio autotuning hybrid_engine
pipeline graph_harvesting eigenvalue progressive_layer_drop nebula timers
weight_quantization quantize_training compile tensor_parallel expert_parallel
torch_autocast managed_gradient_accumulation gradient_allreduce_op disable_allgather
vocabulary_size dataloader_drop_last memory_breakdown log_level
use_data_before_expert_parallelism sequence_parallel_size
seq_parallel_communication_data_type datastates_ckpt trackio
""".split()

WARMUP = {"type": "WarmupLR"}
Keys = list[tuple[tuple[str, ...], Unread]]


def unread_keys(*, unsupported: bool = False) -> Iterator[tuple[dict[str, Any], Keys]]:
    """A config, and the unread keys that can all be added to it at once."""
    alone: Keys = []
    for section, path, around in sections():
        keys = [
            ((*path, key), row)
            for key, row in section.UNREAD.items()
            if (row.status is Status.UNSUPPORTED) == unsupported
        ]
        # All schedules have the same ones, and others need more than their type.
        if around.get("scheduler", WARMUP) != WARMUP:
            continue
        # bfloat16 is bf16 under its old name: a config has one of them.
        if keys and (around or path == ("bfloat16",)):
            yield around, keys
        else:
            alone += keys
    yield {}, alone


ABSENT = object()


def with_keys(around: dict[str, Any], values: dict[tuple[str, ...], Any]) -> Any:
    """The config with a value at each path; ABSENT makes the section alone."""
    raw = copy.deepcopy(around)
    for path, value in values.items():
        section = raw
        for key in path[:-1]:
            section = section.setdefault(key, {})
        if value is not ABSENT:
            section[path[-1]] = value
    return raw


def test_the_table_is_of_sections_and_names_no_field_of_them() -> None:
    assert {*TOP_LEVEL} <= {*Config.known_keys()}
    for name, rows in TABLE.items():
        assert any(rows.items() <= s.UNREAD.items() for s, _, _ in sections()), name
    for section, path, _ in sections():
        assert not section.UNREAD.keys() & section.model_fields.keys(), path
        for row in section.UNREAD.values():
            assert row.sentence.endswith("."), row
            assert row.status not in (Status.USED, Status.UNKNOWN)


def test_no_value_of_them_changes_a_config() -> None:
    """What reads a config finds the same whatever the keys are: nothing reads them."""
    for around, keys in unread_keys():
        paths = [path for path, _ in keys]
        expected = Config.load(with_keys(around, dict.fromkeys(paths, ABSENT)))
        for value in ODD_VALUES:
            raw = with_keys(around, dict.fromkeys(paths, value))
            config = Config.load(raw)
            assert grouping(raw) == grouping(around)
            assert config.model_dump() == expected.model_dump(), value
            assert config.model_fields_set == expected.model_fields_set


@pytest.mark.parametrize("asks", [True, False, None, "auto"])
def test_they_are_told_of_only_where_they_ask_without_effect(asks: Any) -> None:
    for around, keys in unread_keys():
        values = {
            path: (not row.usual[0] if asks else row.usual[0])
            if isinstance(asks, bool)
            else asks
            for path, row in keys
        }
        raw = with_keys(around, values)
        found = {row.key: row for row in report(raw).rows}
        said = {line.partition(": ")[0] for line in notices(Config.load(raw))}
        for path, row in keys:
            key = ".".join(path)
            is_told = row.status is Status.NO_EFFECT and asks is True
            assert (key in said) == is_told, key
            if is_told or row.status is not Status.NO_EFFECT:
                assert found[key].status is row.status
                assert found[key].reason == row.sentence
            else:
                assert found[key].status is Status.AUTOMATIC


def test_an_unsupported_key_is_refused_where_it_asks() -> None:
    for around, keys in unread_keys(unsupported=True):
        nothing = dict.fromkeys(path for path, _ in keys)
        expected = Config.load(with_keys(around, dict.fromkeys(nothing, ABSENT)))
        usual = {path: row.usual[-1] for path, row in keys}
        for values in (nothing, dict.fromkeys(nothing, "auto"), usual):
            config = Config.load(with_keys(around, values))
            assert config.model_dump() == expected.model_dump()
        raw = with_keys(around, {path: not row.usual[0] for path, row in keys})
        with pytest.raises(ConfigError) as error:
            Config.load(raw)
        found = {problem.path: problem for problem in error.value.problems}
        assert found.keys() == {path for path, _ in keys}
        for path, row in keys:
            assert found[path].is_unsupported
            assert found[path].text == f"not supported yet. {row.sentence}"
        ignored = Config.load(raw, ignore_unsupported=True)
        assert {notice.path for notice in ignored.not_done} == found.keys()


def test_a_mistyped_key_below_them_is_refused() -> None:
    opened = [path for _, keys in unread_keys() for path, _ in keys]
    opened = [path for path in opened if path[-1] in opaque.KEYS]
    assert opened
    for path in opened:
        known = opaque.KEYS[path[-1]].split()
        Config.load(with_keys({}, {path: dict.fromkeys(known, 1)}))
        with pytest.raises(ConfigError) as error:
            Config.load(with_keys({}, {path: {f"{known[0]}s": 1}}))
        (problem,) = error.value.problems
        assert problem.path == (*path, f"{known[0]}s")
        assert f"Did you mean {known[0]!r}?" in problem.text
