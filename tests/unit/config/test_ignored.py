"""Keys whose value changes nothing: known, never read, and told of where they ask."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from zinf.config import Config, ConfigError, Status, grouping, notices, opaque, report
from zinf.config.ignored import TABLE, Ignored
from zinf.config.section import Section
from zinf.config.typed import TypedSection

ODD_VALUES = (None, "auto", True, False, 0, -1, 8, 1e9, "x", [1], {})


def sections(
    section: type[Section] = Config, path: tuple[str, ...] = ()
) -> Iterator[tuple[type[Section], tuple[str, ...], dict[str, Any]]]:
    """Every section class, where it is, and what a config needs beside it."""
    yield section, path, {}
    for key in section.model_fields:
        below = section.section_at(key, {})
        if below is None:
            continue
        if not issubclass(below, TypedSection):
            yield from sections(below, (*path, key))
            continue
        for name, params in below.KNOWN.items():
            yield below, (key,), {key: {"type": name}}
            yield params, (key, "params"), {key: {"type": name}}


def keys() -> dict[str, tuple[tuple[str, ...], dict[str, Any], Ignored]]:
    """Every ignored key by its path, the config around it, and its row."""
    found = {}
    for section, path, around in sections():
        for key, ignored in section.IGNORED.items():
            kind = around.get("optimizer", {}).get("type", "")
            found[" ".join([*path, key, kind])] = (*path, key), around, ignored
    return found


KEYS = keys()
OPAQUE = [path for path, _, _ in KEYS.values() if path[-1] in opaque.KEYS]
every = pytest.mark.parametrize(("path", "around", "ignored"), KEYS.values(), ids=KEYS)


def with_keys(around: dict[str, Any], path: tuple[str, ...], **keys: Any) -> dict:
    """The config with these keys in the section at `path`."""
    raw = section = copy.deepcopy(around)
    for key in path:
        section = section.setdefault(key, {})
    section.update(keys)
    return raw


def test_every_row_of_the_table_belongs_to_a_section():
    for name, rows in TABLE.items():
        assert any(rows.items() <= s.IGNORED.items() for s, _, _ in sections()), name


def test_no_key_is_both_ignored_and_a_field():
    for section, path, _ in sections():
        assert not section.IGNORED.keys() & section.model_fields.keys(), path


def test_a_sentence_and_a_status_say_why_a_key_is_ignored():
    for name, (_, _, ignored) in KEYS.items():
        assert ignored.sentence.endswith("."), name
        assert ignored.status in (Status.AUTOMATIC, Status.MOOT, Status.NO_EFFECT)


@every
def test_no_value_of_it_changes_a_config(path, around, ignored):
    """What reads a config finds the same whatever the key is, so nothing reads it."""
    section, key = path[:-1], path[-1]
    expected = Config.load(with_keys(around, section))
    for value in ODD_VALUES:
        raw = with_keys(around, section, **{key: value})
        config = Config.load(raw)
        assert grouping(raw) == grouping(around)
        assert config.model_dump() == expected.model_dump(), value
        assert config.model_fields_set == expected.model_fields_set


@every
def test_it_is_told_of_only_where_it_asks_without_effect(path, around, ignored):
    key = ".".join(path)
    asking = False if ignored.default else True
    for value in (asking, ignored.default, None, "auto"):
        raw = with_keys(around, path[:-1], **{path[-1]: value})
        (row,) = (row for row in report(raw).rows if row.key == key)
        has_no_effect = ignored.status is Status.NO_EFFECT
        is_told = any(line.startswith(f"{key}: ") for line in notices(Config.load(raw)))
        assert is_told == (has_no_effect and value is asking)
        if is_told or not has_no_effect:
            assert (row.status, row.reason) == (ignored.status, ignored.sentence)
        else:
            assert row.status is Status.AUTOMATIC


@pytest.mark.parametrize("path", OPAQUE, ids=".".join)
def test_a_mistyped_key_below_it_is_refused(path):
    known = opaque.KEYS[path[-1]].split()
    Config.load(with_keys({}, path, **dict.fromkeys(known, 1)))
    with pytest.raises(ConfigError) as error:
        Config.load(with_keys({}, path, **{f"{known[0]}s": 1}))
    (problem,) = error.value.problems
    assert problem.path == (*path, f"{known[0]}s")
    assert f"Did you mean {known[0]!r}?" in problem.text


def test_what_has_no_effect_is_still_said_of_a_config_that_is_loaded_again():
    config = Config.load({"dump_state": True, "comms_logger": {"enabled": True}})
    again = Config.load(config, ["run.steps=2"], world_size=4)
    assert notices(again) == notices(config)
    (line,) = notices(Config.load(config, ["comms_logger.enabled=false"]))
    assert line.startswith("dump_state: ")
