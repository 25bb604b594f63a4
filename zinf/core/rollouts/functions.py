"""Reward functions and environments of users, by names of commands and configs."""

import ast
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from zinf.core.config.nearest import did_you_mean
from zinf.core.rollouts.asking import Function

FORM = "Write it as FILE.py:FUNCTION, such as rewards.py:correct"
FORMS = {
    "reward": f"{FORM}, or name the folder of a reward model.",
    "environment": f"{FORM}.",
}


def load_functions(
    names: Sequence[str], folders: Sequence[Path], *, kind: str = "reward"
) -> tuple[Function, ...]:
    """The functions that names such as "rewards.py:correct" stand for.

    Args:
        folders: where files are looked for, in this order.
        kind: one of `FORMS`, for messages.

    Raises:
        ValueError: a name has another form, or there is no such file or function.
    """
    modules: dict[Path, ModuleType] = {}
    found = []
    for name in names:
        path, function = _parts(name, folders, kind)
        if path not in modules:
            modules[path] = _module(path)
        found.append(_function(modules[path], function, f"The {kind} {name!r}"))
    return tuple(found)


def code_digest(names: Sequence[str], folders: Sequence[Path]) -> str:
    """A digest of the functions' names and their files, but for comments and layout.

    Modules that the files import are not in it.

    Raises:
        ValueError: see `load_functions`.
    """
    digest = sha256()
    for name in names:
        path, function = _parts(name, folders, "reward")
        code = ast.dump(ast.parse(path.read_bytes()))
        digest.update(f"{function}\n{code}\n".encode())
    return digest.hexdigest()[:16]


def place_of_model(name: str, folders: Sequence[Path]) -> str | None:
    """The folder or hub name of a reward model; None if a name is of a function.

    Args:
        folders: where folders are looked for, in this order.
    """
    for folder in folders:
        path = folder / Path(name).expanduser()
        if path.is_dir():
            return str(path)
    return None if ":" in name or name.endswith(".py") else name


def _parts(name: str, folders: Sequence[Path], kind: str) -> tuple[Path, str]:
    """The file and the function of a name."""
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        text = f"The {kind} {name!r} is no function of a file. {FORMS[kind]}"
        raise ValueError(text)
    for folder in folders:
        path = folder / Path(file).expanduser()
        if path.is_file():
            return path.resolve(), function
    places = (
        "" if Path(file).is_absolute() else f" in {' and '.join(map(str, folders))}"
    )
    raise ValueError(f"The {kind} {name!r}: there is no file {file}{places}.")


def _module(path: Path) -> ModuleType:
    # As Python does for the folder of a script: modules beside the file are found.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, function: str, title: str) -> Function:
    found = getattr(module, function, None)
    if callable(found):
        return found
    own = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
    raise ValueError(
        f"{title}: {module.__file__} has no function {function}."
        f"{did_you_mean(function, own)} It has {', '.join(own) or 'none'}."
    )
