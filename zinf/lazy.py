"""Packages whose names are imported when somebody first asks for them (PEP 562).

jax and optax take half a second of a processor to import, and numba, Orbax and grain as
much again. A package made lazy costs only what is used of it.
"""

import gc
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package that knows where each of its names is."""

    lazy_names: Mapping[str, str]
    lazy_modules: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name in self.lazy_modules:
            return import_at_once(f"{self.__name__}.{name}")
        if name not in self.lazy_names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_at_once(self.lazy_names[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each submodule as an attribute of its package. Where a
        # function has the name of its module (zinf.initialize), the function stays.
        if isinstance(value, ModuleType) and name in self.lazy_names:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.lazy_names, *self.lazy_modules})


def import_at_once(name: str) -> ModuleType:
    """Imports a module without collecting garbage meanwhile.

    Modules make many objects that stay. Looking through all of them for garbage, again
    and again, took an eighth of the time of `import zinf; zinf.initialize`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def make_lazy(
    package: str, names: Mapping[str, str], *, modules: tuple[str, ...] = ()
) -> None:
    """Lets a package import its public names when they are first used.

    Call this in the package's `__init__`, with the same names imported under
    `if TYPE_CHECKING:` for type checkers and editors.

    Args:
        package: the package's `__name__`.
        names: by public name, the module that has it as an attribute.
        modules: submodules that are public names themselves.
    """
    module = sys.modules[package]
    vars(module).update(lazy_names=dict(names), lazy_modules=modules)
    module.__class__ = LazyPackage
