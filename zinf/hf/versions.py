"""Compares the installed libraries with those that `zinf.hf` was tested with."""

import logging
from importlib import metadata
from pkgutil import iter_modules

from packaging.specifiers import SpecifierSet

from zinf.core.process.lazy import MissingExtra, import_at_once

# The versions that the extra `hf` of zinf requires.
TESTED = {
    "huggingface-hub": ">=2.4,<3",
    "jinja2": ">=3.1.6,<4",
    "pillow": ">=13,<14",
    "safetensors": ">=0.8,<0.9",
    "scipy": ">=1.14,<2",
    "tokenizers": ">=0.23,<0.24",
    "torch": ">=2.13,<2.14",
    "torchax": "==0.0.14.dev20261026",
    "transformers": ">=5.24,<5.25",
}

logger = logging.getLogger(__name__)


class UntestedVersions(MissingExtra):
    """Libraries of the extra `hf` lack something that zinf uses."""


def check() -> None:
    """Look at the versions before anything of `zinf.hf` is used.

    With versions that were not tested, all modules of `zinf.hf` are imported now: one
    that cannot be would otherwise fail where it is first used, which may be the export
    at the end of a run.

    Raises:
        UntestedVersions: a module cannot be imported; says what was tested and what is
            there.
    """
    found = untested()
    if not found:
        return
    there = ", and ".join(found)
    try:
        import_all()
    except ImportError as error:
        raise UntestedVersions(
            f"zinf.hf cannot use what is installed: {error}. It was tested with "
            f"{there}. Install what was tested: pip install --upgrade 'zinf[hf]'"
        ) from error
    logger.warning(
        "zinf.hf was tested with %s. If a model does not load, train or export, "
        "install what was tested: pip install --upgrade 'zinf[hf]'",
        there,
    )


def untested() -> list[str]:
    """Libraries of other versions than were tested; none if one is not installed.

    Each as "transformers >=1,<2 (2.1 is here)".
    """
    try:
        here = {name: metadata.version(name) for name in TESTED}
    except metadata.PackageNotFoundError:
        return []
    return [
        f"{name} {wanted} ({here[name]} is here)"
        for name, wanted in TESTED.items()
        if not SpecifierSet(wanted).contains(here[name], prereleases=True)
    ]


def import_all() -> None:
    """Import all modules of `zinf.hf`."""
    package = __name__.rpartition(".")[0]
    for module in iter_modules(import_at_once(package).__path__):
        import_at_once(f"{package}.{module.name}")
