"""Libraries of other versions than were tested are told at the first use of zinf.hf."""

import logging
from importlib import metadata

import pytest

from tests.test_project import PROJECT, requirement_name
from zinf import hf
from zinf.core.process.lazy import MissingExtra
from zinf.hf import versions

OLD = {"transformers": "5.17.0", "torch": "2.14.1+cpu"}


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions of libraries; those left out keep their own."""
    real = metadata.version

    def install(**others: str) -> None:
        monkeypatch.setattr(
            metadata, "version", lambda name: others.get(name) or real(name)
        )

    return install


def test_what_was_tested_is_what_the_extra_installs():
    extra = PROJECT["optional-dependencies"]["hf"]
    wanted = {requirement_name(x): x.removeprefix(requirement_name(x)) for x in extra}
    del wanted["packaging"]  # It reads the ranges.
    assert versions.TESTED == wanted
    assert versions.untested() == []


def test_other_versions_that_can_be_imported_are_a_warning(installed, caplog):
    installed(**OLD)
    with caplog.at_level(logging.WARNING):
        versions.check()
    assert "transformers >=5.24,<5.25 (5.17.0 is here)" in caplog.text
    assert "torch >=2.13,<2.14 (2.14.1+cpu is here)" in caplog.text
    assert "pip install" in caplog.text and "jinja2" not in caplog.text


def test_what_cannot_be_imported_fails_at_the_first_use_and_not_in_the_export(
    installed, monkeypatch
):
    def fail() -> None:
        raise ImportError("cannot import name 'SplitModulelist'")

    installed(**OLD)
    monkeypatch.setattr(versions, "import_all", fail)
    monkeypatch.setattr(hf, "lazy_door", versions.__name__)
    monkeypatch.delitem(vars(hf), "load", raising=False)
    words = "SplitModulelist.*transformers >=5.24,<5.25 .5.17.0 is here.*pip install"
    for _ in range(2):  # Also the next time.
        with pytest.raises(MissingExtra, match=words):
            _ = hf.load


def test_versions_are_not_looked_at_where_one_is_not_installed(monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert versions.untested() == []


def test_the_check_of_a_package_runs_once(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(versions, "check", lambda: calls.append(1))
    monkeypatch.setattr(hf, "lazy_door", versions.__name__)
    for name in ("load", "export"):
        monkeypatch.delitem(vars(hf), name, raising=False)
        getattr(hf, name)
    assert calls == [1]
