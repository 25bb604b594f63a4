"""Whatever fails in a step: it is named, and training resumes with the same losses."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from errno import EIO, ENOSPC, ETIMEDOUT
from pathlib import Path
from threading import Thread
from typing import Any

import optax
import pytest

import zinf
from tests.clock import still
from tests.robustness.faults import (
    BlockLayer,
    Gate,
    Rule,
    before,
    eventually,
    fail,
    flip_bit,
    open_files,
    pretend,
)
from tests.robustness.small import (
    draw,
    expect_at_rest,
    init,
    loss_fn,
    on_nvme,
    with_tight_host,
)
from zinf import Engine
from zinf.core.memory.nvme import drive, open_file
from zinf.core.memory.storage_error import StorageError
from zinf.core.program import ArrayId, Role

NUM_STEPS = 5
STALL_SECONDS = 0.5
WEIGHT = ArrayId(Role.PARAM, "layers/1/w")
Start = Callable[..., Engine]


def losses(engine: Engine, first: int, last: int = NUM_STEPS) -> list[float]:
    return [engine.step(draw(step))["loss"] for step in range(first, last + 1)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run."""
    config = on_nvme(tmp_path_factory.mktemp("undisturbed") / "nvme")
    tx = optax.adam(1e-2)
    with zinf.initialize(loss_fn, init, tx, config, batch=draw()) as engine:
        return losses(engine, 1)


@dataclass
class Trained:
    """An engine on a faulty drive after two steps, which are saved, and a third.

    The next step begins with updates that are due, if any are left to the next step.
    """

    engine: Engine
    layer: BlockLayer
    saved: Path
    folder: Path

    @property
    def files(self) -> list[Path]:
        """The chunk files of a weight."""
        assert self.engine.stores.nvme is not None
        return self.engine.stores.nvme.chunk_files(WEIGHT)

    def expect_resumes(self, expected: list[float]) -> None:
        """Without faults the engine goes on from the checkpoint bit for bit."""
        self.expect_at_rest()
        self.engine.restore(self.saved)
        assert losses(self.engine, 3) == expected[2:]
        self.expect_at_rest()

    def expect_at_rest(self) -> None:
        expect_at_rest(self.engine)
        assert open_files(self.folder / "arrays") == []


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> BlockLayer:
    """What drives that are opened from now on ask."""
    layer = BlockLayer()
    monkeypatch.setattr(drive, "System", lambda: layer.system)
    return layer


@pytest.fixture
def train(layer: BlockLayer, start: Start, tmp_path: Path) -> Callable[..., Trained]:
    def train(**memory: Any) -> Trained:
        config = on_nvme(tmp_path / "nvme")
        config["memory"] |= memory
        engine = start(config, batch=draw())
        losses(engine, 1, 2)
        engine.save(tmp_path / "saved")
        losses(engine, 3, 3)
        return Trained(engine, layer, tmp_path / "saved", tmp_path / "nvme")

    return train


@pytest.mark.parametrize(
    "rule",
    [
        Rule("pwritev", fail(EIO), first=5, times=1),
        Rule("preadv", flip_bit(3), first=4),
    ],
    ids=["the fifth write", "a wrong bit"],
)
def test_a_step_that_fails_is_done_again_from_the_checkpoint(rule, train, expected):
    trained = train()
    with trained.layer.broken(rule):
        with pytest.raises(StorageError) as caught:
            trained.engine.step(draw(4))
    assert caught.value.errno == EIO
    assert caught.value.filename.startswith(str(trained.folder / "arrays"))
    assert any("in instruction #" in note for note in caught.value.__notes__)
    trained.expect_resumes(expected)


def test_a_write_that_was_none_is_found_in_the_next_step(train, expected):
    trained = train()
    with trained.layer.broken(Rule("pwritev", pretend, first=4, times=1)):
        with pytest.raises(StorageError, match="not what was written"):
            assert trained.engine.step(draw(4))["loss"] == expected[3]
            trained.engine.step(draw(5))
    trained.expect_resumes(expected)


def test_a_drive_that_stalls_in_a_step_fails_it_in_time(train, expected):
    gate = Gate()
    trained = train(stall_seconds=STALL_SECONDS)

    def stall() -> None:
        gate.wait()
        clock.advance(2 * STALL_SECONDS)

    Thread(target=stall).start()
    stalled = Rule("preadv", gate, path=str(trained.files[0]))
    with still("monotonic", drive, open_file) as clock, trained.layer.broken(stalled):
        with pytest.raises(StorageError, match="memory.stall_seconds is 0.5") as caught:
            trained.engine.step(draw(4))
        assert caught.value.errno == ETIMEDOUT
        gate.open()
    # Until its threads have their answers, nothing more is asked of the drive.
    drives = trained.engine.stores.nvme._drives
    eventually(lambda: not any(x.is_stalled for x in drives))
    trained.expect_resumes(expected)


def test_a_file_that_is_changed_in_mid_step_is_not_trained_on(
    train, expected, tmp_path
):
    trained = train()
    shutil.copytree(trained.saved, tmp_path / "copied")
    # What no update has written since shares its files with the tier.
    trained.engine.save(tmp_path / "latest")

    def flip() -> None:
        for file in trained.files:
            data = bytearray(file.read_bytes())
            data[100] ^= 16
            file.write_bytes(data)

    files = f"{trained.folder}/arrays/*"
    with trained.layer.broken(Rule("open", before(flip), path=files, times=1)):
        with pytest.raises(StorageError) as caught:
            trained.engine.step(draw(4))
    assert caught.value.errno == EIO
    assert caught.value.filename in map(str, trained.files)
    trained.expect_at_rest()
    with pytest.raises(StorageError, match="Cannot read param/layers/1/w"):
        trained.engine.restore(tmp_path / "latest")
    trained.saved = tmp_path / "copied"
    trained.expect_resumes(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "code"), [("allocate", ENOSPC), ("pwritev", EIO)])
def test_a_fault_at_the_start_is_named_and_the_folder_can_be_used_at_once(
    call, code, layer, start, tmp_path, expected
):
    config = on_nvme(tmp_path / "nvme")
    with layer.broken(Rule(call, fail(code), first=7)):
        with pytest.raises(StorageError) as caught:
            start(config, batch=draw())
    assert caught.value.errno == code
    assert caught.value.filename.startswith(str(tmp_path / "nvme"))
    assert open_files(tmp_path / "nvme") == []
    engine = start(config, batch=draw())
    assert losses(engine, 1, 2) == expected[:2]


def test_a_gradient_that_finds_no_room_leaves_nothing(layer, start, tmp_path):
    """What has no place on the host is put into files that the step makes."""
    broken, unharmed = (
        start(with_tight_host(config), batch=draw())
        for config in (on_nvme(tmp_path / n, gradient_clipping=1.0) for n in "ab")
    )
    nvme = broken.stores.nvme
    numbers = {nvme.folder(array).name for array in broken.residents.specs}
    rule = Rule(
        "allocate", fail(ENOSPC), when=lambda c: c.path.parent.name not in numbers
    )
    with layer.broken(rule):
        with pytest.raises(StorageError) as caught:
            broken.step(draw())
    assert caught.value.errno == ENOSPC
    expect_at_rest(broken)
    assert broken.step(draw())["loss"] == unharmed.step(draw())["loss"]
    expect_at_rest(broken)
