"""A task whose loss and parameters a function of the user makes: `model.function`.

The function returns `(loss_fn, params)`, as `zinf.initialize` takes them, or a dict of
arguments of `zinf.initialize` by name. A batch is that of the config's data: {"tokens":
int32 (samples, data.sequence_length + 1)}.
"""

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from xxhash import xxh3_128

from zinf.cli.gpt_task import Arguments, GptTask
from zinf.core.config import Config
from zinf.core.config.nearest import did_you_mean
from zinf.core.optim.transforms.factory import build_optimizer

NAMED = ("rng", "has_aux", "eval_loss_fn", "model_state", "state_rules")
KEYS = ("loss_fn", "params", *NAMED)


class FunctionTask(GptTask):
    """A task of a model whose parts are not known; what needs them is refused."""

    num_parameters = None
    is_entropy = False
    _knows_weights = False

    def arguments(self, num_shares: int = 1) -> Arguments:
        named = own_arguments(self.config)
        loss, params = named.pop("loss_fn"), named.pop("params")
        named = {"rng": None, "batch": self.batch_spec(num_shares)} | named
        tx = build_optimizer(self.config)
        return (loss, params, tx, self.config.told()), named

    def digests(self) -> dict[str, str]:
        return super().digests() | {"model.function.content": code_digest(self.config)}


def own_arguments(config: Config) -> dict[str, Any]:
    """What `model.function` returns, as arguments of `zinf.initialize` by name.

    Raises:
        ValueError: there is no such module or function, or it returns something else.
    """
    assert config.model is not None and config.model.function is not None
    name = config.model.function
    make = _function(name, config.folders_of_modules())
    returned = make(config) if _takes_config(make, name) else make()
    asked = f"model.function {name} must return (loss_fn, params), or a dict of them"
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = {"loss_fn": returned[0], "params": returned[1]}
    if not isinstance(returned, Mapping):
        raise ValueError(f"{asked}; it returned {_kind(returned)}.")
    unknown = [key for key in returned if key not in KEYS]
    if unknown or not {"loss_fn", "params"} <= returned.keys():
        raise ValueError(
            f"{asked} and any of {', '.join(NAMED)} of zinf.initialize; the dict has "
            f"{', '.join(map(str, returned)) or 'no key'}."
        )
    if _is_module(returned["params"]):
        raise ValueError(
            f"{asked}; params is a module of flax.nnx. Return graphdef, params = "
            "nnx.split(module) and a loss of params, which calls nnx.merge(graphdef, "
            "params)."
        )
    return dict(returned)


def code_digest(config: Config) -> str:
    """A digest of the module's code, without its comments and its layout.

    Modules that it imports are not in it.

    Raises:
        ValueError: there is no such module or function.
    """
    assert config.model is not None and config.model.function is not None
    name = config.model.function
    _function(name, config.folders_of_modules())
    file = sys.modules[name.partition(":")[0]].__file__
    if file is None or Path(file).suffix != ".py":
        return ""  # A compiled module has no code to read.
    code = ast.dump(ast.parse(Path(file).read_bytes()))
    return xxh3_128(code.encode()).hexdigest()


def _is_module(params: Any) -> bool:
    """Whether `params` is a flax.nnx module, without importing flax.nnx (0.5 s)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(params, nnx.Module)


def _function(name: str, folders: Sequence[Path]) -> Callable:
    """The function that "module:function" names, of a module in one of the folders."""
    module_name, _, function = name.partition(":")
    module = _module(name, module_name, folders)
    found = getattr(module, function, None)
    if callable(found):
        return found
    own = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
    problem = "it is no function" if found is not None else "there is none"
    raise ValueError(
        f"model.function asks for {function} of {module.__file__}, and {problem}."
        f"{did_you_mean(function, own)} The file has {', '.join(own) or 'none'}."
    )


def _module(name: str, module: str, folders: Sequence[Path]) -> ModuleType:
    # As Python does for the folder of a script: modules beside it are found, now and
    # when the function imports them later.
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # One that the user's module imports.
        files = {p.stem for folder in folders for p in folder.glob("*.py")}
        places = " and ".join(map(str, folders))
        raise ValueError(
            f"model.function is {name!r}, and there is no module {error.name} in "
            f"{places}, nor is one installed.{did_you_mean(error.name, files)} Write "
            "it as module:function, for a file module.py in one of those folders."
        ) from None


def _takes_config(make: Callable, name: str) -> bool:
    """Whether a function takes an argument, which is the config."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    takes = [p for p in signature(make).parameters.values() if p.kind in positional]
    if sum(p.default is Parameter.empty for p in takes) > 1:
        raise ValueError(
            f"model.function {name} must take no argument, or one, the config; it "
            f"takes {', '.join(p.name for p in takes)}."
        )
    return bool(takes)


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"a {type(value).__name__}{size}"
