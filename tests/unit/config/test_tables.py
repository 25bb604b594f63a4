"""Tables of configs: what each comes to, what is said of it, why it is refused.

The configs are in YAML files, the expected text is in golden files.
"""

from typing import Any

from tests.golden import Golden
from tests.unit.config.cases import PUBLIC, entry, properties, shown, table, values
from zinf.core.config import Config, ConfigError, notices, report

# Devices that a public file is for, where they are more than one.
WORLD_SIZES = {"examples_bert_lamb": 8, "examples_chat_lora": 8, "deepspeed_zeropp": 4}


def test_what_configs_come_to(golden: Golden) -> None:
    usual = [f"{name} {shown(value)}" for name, value in properties(Config.load({}))]
    found = [entry(raw, values(raw)) for raw in table("values.yaml")]
    golden.check("values.txt", "\n\n".join([entry({}, usual), *found]))


def refusals(raw: dict[str, Any]) -> list[str]:
    """The problems of a config, and what it comes to without unsupported keys."""
    try:
        Config.load(raw)
    except ConfigError as error:
        problems, message = error.problems, str(error)
    else:
        raise AssertionError(f"{raw} is not refused")
    unsupported = [problem for problem in problems if problem.is_unsupported]
    assert f"has {len(problems)} problem" in message
    assert ("ignore_unsupported: true" in message) == bool(unsupported)
    lines = [str(problem) for problem in problems]
    try:
        config = Config.load(raw, ignore_unsupported=True)
    except ConfigError as error:
        assert not any(problem.is_unsupported for problem in error.problems)
        assert len(unsupported) < len(problems)
        return lines
    assert len(unsupported) == len(problems)
    return [*lines, *(f"ignored: {notice}" for notice in notices(config))]


def test_mistakes_are_named_with_their_paths_and_what_is_allowed(
    golden: Golden,
) -> None:
    found = [entry(raw, refusals(raw)) for raw in table("refused.yaml")]
    golden.check("refused.txt", "\n\n".join(found))


def test_what_has_no_effect_is_said_in_a_line(golden: Golden) -> None:
    found = []
    for raw in table("notices.yaml"):
        lines = notices(Config.load(raw))
        assert {*lines} <= {*report(raw).notes}
        assert not any("\n" in line for line in lines)
        found.append(entry(raw, [*lines] or ["(nothing)"]))
    golden.check("notices.txt", "\n\n".join(found))


def test_what_each_key_of_a_config_does(golden: Golden) -> None:
    found = [entry(raw, str(report(raw)).splitlines()) for raw in table("reports.yaml")]
    golden.check("reports.txt", "\n\n".join(found))


def test_public_configs_of_deepspeed_load_or_are_refused_by_key(golden: Golden) -> None:
    for name, path in PUBLIC.items():
        world_size = WORLD_SIZES.get(name, 1)
        found = report(path, world_size=world_size)
        lines = [str(found), "", "without what is not supported:"]
        try:
            config = Config.load(path, world_size=world_size, ignore_unsupported=True)
        except ValueError as error:
            lines += [str(error).replace(str(path), path.name)]
        else:
            lines += notices(config)
            given = config.model_dump(exclude_unset=True)
            lines += values(given, world_size=world_size)
        golden.check(f"public/{name}.txt", "\n".join(lines))
