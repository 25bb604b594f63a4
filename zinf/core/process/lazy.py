"""Packages that import their public names on first use (PEP 562).

Importing jax and optax takes half a second of CPU time, and numba, Orbax and grain take
as long again. A lazy package imports only what is used.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from zinf.core.process.uncollected import uncollected


class MissingExtra(ImportError):
    """A library is not installed that only an extra of zinf brings."""


class LazyPackage(ModuleType):
    """A package that imports the module of a public name when the name is first read.

    Attributes:
        lazy_names: the module of each public name.
        lazy_modules: modules that are public names themselves, by these names.
        lazy_extra: the extra of zinf that the package needs; "" if it needs none.
        lazy_door: a module whose `check()` runs before the first name is imported; ""
            if there is none, or it has run.
    """

    lazy_names: Mapping[str, str]
    lazy_modules: Mapping[str, str]
    lazy_extra: str
    lazy_door: str

    def __getattr__(self, name: str) -> Any:
        if name in self.lazy_modules:
            module = import_at_once(self.lazy_modules[name])
            setattr(self, name, module)
            return module
        if name not in self.lazy_names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            self._check_once()
            value = getattr(import_at_once(self.lazy_names[name]), name)
        except ModuleNotFoundError as error:
            if not self.lazy_extra:
                raise
            raise MissingExtra(
                f"{self.__name__} needs {error.name}, which is not installed: "
                f"pip install 'zinf[{self.lazy_extra}]'"
            ) from error
        setattr(self, name, value)
        return value

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
        if isinstance(value, ModuleType) and name in self.lazy_names:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles modules by name, but only those whose type is ModuleType.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.lazy_names, *self.lazy_modules})


def import_at_once(name: str) -> ModuleType:
    """Import a module with the garbage collector paused.

    Modules create many objects that stay. The collector scanned them repeatedly, which
    took an eighth of the time of `import zinf; zinf.initialize`.
    """
    with uncollected():
        return import_module(name)


def make_lazy(
    package: str,
    names: Mapping[str, str],
    *,
    modules: tuple[str, ...] = (),
    extra: str = "",
    door: str = "",
) -> None:
    """Make a package import its public names on first use.

    Call this in the package's `__init__`, with the same names imported under
    `if TYPE_CHECKING:` for type checkers and editors.

    Args:
        package: the package's `__name__`.
        names: for each public name, the module that has it as an attribute.
        modules: modules that are public names themselves, by their names below the
            package; `core.config` is the name `config`.
        extra: the extra of zinf that brings what the package imports, if one does.
        door: a module whose `check()` runs before the first name is imported.
    """
    module = sys.modules[package]
    vars(module).update(
        lazy_names=dict(names),
        lazy_modules={name.rpartition(".")[2]: f"{package}.{name}" for name in modules},
        lazy_extra=extra,
        lazy_door=door,
    )
    module.__class__ = LazyPackage
