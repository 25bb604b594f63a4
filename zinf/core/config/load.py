"""Reading a config: a YAML or JSON file or a mapping, with `a.b=value` on top."""

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Never

import yaml

from zinf.core.config.nearest import did_you_mean
from zinf.core.config.section import Section

SUFFIXES = (".yaml", ".yml", ".json")
# The longest configs have some hundred values, nested five deep. Aliases of YAML repeat
# values: nine lines can stand for 10 ** 9 of them. PyYAML takes some ten seconds for as
# many bytes.
MAX_VALUES, MAX_DEPTH, MAX_BYTES = 100_000, 50, 2**20


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-4 is a number, and no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML reads YAML 1.1, where 1e-4 is a string: a float needs a dot there.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
    list("-+0123456789."),
)


def _load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: it is no YAML, or is nested too deeply, refers to itself, or has
            too many values, each alias counted in full; or a value is none of its type,
            as the date 2026-13-01.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's constructors of dates, numbers and tags raise what Python does.
        text = f"a value cannot be read ({type(error).__name__}: {error})"
        raise yaml.YAMLError(text) from error
    finally:
        loader.dispose()


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _check_size(root: yaml.Node) -> None:
    """Raise yaml.YAMLError if a document is too large with each alias in full."""
    # The number of values and of levels of each node; None while they are counted.
    sizes: dict[int, tuple[int, int] | None] = {}

    def refuse(node: yaml.Node, problem: str) -> Never:
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)

    def size(node: yaml.Node) -> tuple[int, int]:
        if id(node) in sizes:
            known = sizes[id(node)]
            return known or refuse(node, "it has an alias that refers to itself")
        sizes[id(node)] = None
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        below = [size(child) for child in children]
        total = 1 + sum(values for values, _ in below)
        levels = 1 + max((levels for _, levels in below), default=0)
        if total > MAX_VALUES:
            refuse(node, f"it has more than {MAX_VALUES:,} values, with its aliases")
        if levels > MAX_DEPTH:
            refuse(node, _TOO_DEEP)
        sizes[id(node)] = total, levels
        return total, levels

    size(root)


def raw_config(
    source: Mapping[str, Any] | str | Path | Section | None,
) -> dict[str, Any]:
    """The keys and values in a mapping, file or config, not yet checked.

    Raises:
        TypeError: it is none of those.
        FileNotFoundError, ValueError: see `read`.
    """
    match source:
        case None:
            return {}
        case Section():
            return source.model_dump(exclude_unset=True)
        case Mapping():
            return dict(source)
        case str() | Path():
            return read(Path(source).expanduser())
        case _:
            found = f"found a {type(source).__name__}"
            raise TypeError(f"config must be a mapping, a path or a Config; {found}")


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty YAML file is an empty mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not valid YAML or JSON, or holds no mapping.
    """
    if path.is_dir():
        raise IsADirectoryError(f"config {path} is a folder; give a file in it")
    if not path.exists():
        raise FileNotFoundError(_not_found(path))
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"config {path}: the name must end in {', '.join(SUFFIXES)}")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"config {path} has more than {MAX_BYTES:,} bytes, as no config has. Name "
            "another file."
        )
    try:
        # As text files are read: the ends of lines are those of any system.
        text = StringIO(content.decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path} is not UTF-8 text: {error}") from error
    is_json = path.suffix.lower() == ".json"
    value = _parse_json(text, path) if is_json else _parse_yaml(text, path)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"config {path} must hold a mapping of keys; found a {kind}")
    return value


def override(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each "a.b=value" set; values are read as YAML.

    Raises:
        ValueError: an override has no "=", no key, a value that is not YAML, or goes
            below a key that holds no mapping.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of texts; found {overrides!r}")
    result = copy.deepcopy(dict(raw))
    for text in overrides:
        key, equals, value = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ValueError(f"override {text!r} must be of the form a.b=value")
        try:
            _set(result, path, _value(value))
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(f"override {text!r}: {error}") from error
    return result


def _value(text: str) -> Any:
    """A value as YAML; what cannot begin YAML, such as `*.txt`, is a string."""
    if text.strip()[:1] in tuple("*&!%@`"):
        return text.strip()
    return _load_yaml(text)


def _set(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        # A null section is as an absent one: keys can be set below it.
        below = raw.get(key)
        raw[key] = raw = {} if below is None else below
        if not isinstance(raw, dict):
            above = ".".join(path[: depth + 1])
            raise TypeError(f"{above} is {raw!r}, which has no keys below it")
    raw[path[-1]] = value


# DeepSpeed reads its files with hjson, so comments and trailing commas are common in
# them. Strings are matched first, so that a "//" in a path is no comment. What is left
# open is matched to its end: it would be searched again from each character in it.
_NO_JSON = re.compile(
    r""""(?:\\.|[^"\\])*"?|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)|,(?=\s*[}\]])""",
    re.DOTALL,
)


def _strict_json(text: str) -> str:
    """JSON without comments and trailing commas; line numbers stay the same."""

    def kept(match: re.Match[str]) -> str:
        part = match.group()
        return part if part.startswith('"') else re.sub(r"[^\n]", " ", part)

    # Comments go in the first pass: one may stand between a trailing comma and its "}".
    return _NO_JSON.sub(kept, _NO_JSON.sub(kept, text))


def _not_found(path: Path) -> str:
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [sibling.name for sibling in siblings if sibling.suffix in SUFFIXES]
    hint = did_you_mean(path.name, names)
    return f"config {path} does not exist (looked in {path.parent.absolute()}).{hint}"


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        value = _load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"config {path} is not valid YAML: {_where(error)}") from error
    return {} if value is None else value


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


def _parse_json(text: str, path: Path) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted(key for key, count in Counter(keys).items() if count > 1)
        if twice:
            raise ValueError(f"{', '.join(twice)} given twice")
        return dict(pairs)

    try:
        return json.loads(_strict_json(text), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise ValueError(f"config {path} is not valid JSON: {_TOO_DEEP}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"config {path} is not valid JSON: line {error.lineno}, column "
            f"{error.colno}: {error.msg}."
        ) from error
    except ValueError as error:
        # Also of a number with thousands of digits.
        raise ValueError(f"config {path}: {error}") from error
