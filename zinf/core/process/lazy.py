"""Packages that import their public names on first use (PEP 562).

Importing jax and optax takes half a second of CPU time, and numba, Orbax and grain take
as long again. A lazy package imports only what is used.
"""

import ast
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from zinf.core.process.uncollected import uncollected


class MissingExtra(ImportError):
    """A library is not installed that only an extra of zinf brings."""


class LazyPackage(ModuleType):
    """A package that imports the module of a public name when the name is first read.

    Attributes:
        lazy_names: the module of each public name; the package of one that is itself a
            module.
        lazy_extra: the extra of zinf that the package needs; "" if it needs none.
        lazy_door: a module whose `check()` runs before the first name is imported; ""
            if there is none, or it has run.
    """

    lazy_names: Mapping[str, str]
    lazy_extra: str
    lazy_door: str

    def __getattr__(self, name: str) -> Any:
        if name not in self.lazy_names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            self._check_once()
            value = self._imported(name)
        except ModuleNotFoundError as error:
            if not self.lazy_extra:
                raise
            raise MissingExtra(
                f"{self.__name__} needs {error.name}, which is not installed: "
                f"pip install 'zinf[{self.lazy_extra}]'"
            ) from error
        super().__setattr__(name, value)
        return value

    def _imported(self, name: str) -> Any:
        home = self.lazy_names[name]
        module = import_at_once(home)
        if module is not self and hasattr(module, name):
            return getattr(module, name)
        return import_at_once(f"{home}.{name}")

    def _check_once(self) -> None:
        door, self.lazy_door = self.lazy_door, ""
        if not door:
            return
        try:
            import_at_once(door).check()
        except BaseException:
            self.lazy_door = door
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each submodule as an attribute of its package. If a
        # function has the name of its module (zinf.moe.experts), set the function.
        own = f"{self.__name__}.{name}"
        if isinstance(value, ModuleType) and self.lazy_names.get(name) == own:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles modules by name, but only those whose type is ModuleType.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.lazy_names})


def import_at_once(name: str) -> ModuleType:
    """Import a module with the garbage collector paused.

    Modules create many objects that stay. The collector scanned them repeatedly, which
    took an eighth of the time of `import zinf; zinf.initialize`.
    """
    with uncollected():
        return import_module(name)


def make_lazy(package: str, *, extra: str = "", door: str = "") -> None:
    """Make a package import its public names on first use.

    The names are those that its `__init__` imports under `if TYPE_CHECKING:`, where
    type checkers and editors see them.

    Args:
        package: the package's `__name__`.
        extra: the extra of zinf that brings what the package imports, if one does.
        door: a module whose `check()` runs before the first name is imported.
    """
    module = sys.modules[package]
    names = _checked_names(Path(str(module.__file__)).read_text("utf-8"))
    vars(module).update(lazy_names=names, lazy_extra=extra, lazy_door=door)
    module.__class__ = LazyPackage


def _checked_names(source: str) -> dict[str, str]:
    """The module of each name that is imported under `if TYPE_CHECKING:`."""
    return {
        name.name: str(node.module)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
