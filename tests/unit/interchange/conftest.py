"""Engines that are closed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.interchange import models
from zinf import Engine

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """`start(config, params, tx)`: an engine on the model of `models`."""
    engines: list[Engine] = []

    def make(*arguments: Any, **named: Any) -> Engine:
        engines.append(models.start(*arguments, **named))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def trained(start: Start, folder: Path) -> Engine:
    """Mixed precision on a drive, after a step: masters, frozen copies, one tie."""
    engine = start(models.on_nvme(folder / "trained", **models.BF16))
    engine.step(models.draw())
    return engine


@pytest.fixture(scope="module")
def saved_folder(trained: Engine, folder: Path) -> Path:
    trained.save(folder / "saved")
    return folder / "saved"
