"""Drives on a small folder, whose calls of the kernel are noted and can go wrong."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.faults import BlockLayer, eventually, open_files, threads_of
from zinf.core.memory.nvme import Drive, Profile
from zinf.core.memory.nvme.open_file import Mover

BLOCK_BYTES = 64 * 1024


@pytest.fixture
def layer() -> BlockLayer:
    return BlockLayer()


@pytest.fixture
def make_drive(tmp_nvme: Path, layer: BlockLayer) -> Iterator[Callable[..., Drive]]:
    """Makes drives on one folder, and closes them; neither threads nor files stay."""
    made: list[Drive] = []

    def make(*, num_threads: int = 3, **settings: Any) -> Drive:
        profile = Profile(block_bytes=BLOCK_BYTES, num_threads=num_threads)
        made.append(Drive(tmp_nvme, profile=profile, system=layer.system, **settings))
        return made[-1]

    yield make
    for drive in made:
        drive.close()
    eventually(lambda: not threads_of(tmp_nvme))
    assert open_files(tmp_nvme) == []


@pytest.fixture
def drive(make_drive: Callable[..., Drive]) -> Drive:
    return make_drive()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def mover(request: pytest.FixtureRequest, layer: BlockLayer) -> Mover:
    """A way to move bytes, past the page cache and through it."""
    return Mover(layer.system, BLOCK_BYTES, is_direct=request.param)
