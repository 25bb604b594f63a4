"""Checkpoints are kept, found and resumed, and none is lost to whatever happens.

In a folder, and in object storage, which is a folder that is used like a bucket.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, EMBED, SavedEngine, advance
from zinf.checkpoint import Checkpoints
from zinf.checkpoint.save import AbstractSave
from zinf.core.memory import StorageError
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Tier


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where checkpoints go; their files are below `tmp_path / "saved"`."""
    saved = tmp_path / "saved"
    return f"file://{saved}" if request.param == "bucket" else saved


@pytest.fixture
def engine(open_residents) -> SavedEngine:
    tiers = [Tier.NVME, Tier.HOST, Tier.DEVICE]
    return SavedEngine(open_residents(tiers), {"num_steps": 0})


def steps_in(folder: Path) -> set[str]:
    return {path.parts[len(folder.parts)] for path in folder.rglob("manifest.json")}


def test_the_newest_are_kept_and_any_of_them_restored(place, engine, tmp_path):
    with Checkpoints(place, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(FileNotFoundError):
            checkpoints.restore(engine)
        for step in (5, 10, 15):
            advance(engine, step)
            checkpoints.save(step, engine, {"position": step})
        assert checkpoints.latest_step() == 15
        checkpoints.wait()
        with pytest.raises(FileExistsError, match="15 already"):
            checkpoints.save(15, engine)
    assert steps_in(tmp_path / "saved") == {"10", "15"}


@pytest.mark.parametrize(
    "state", [{"a": [1, None], "b": {"c": b"\x00"}}, b"\x00\xff", None]
)
def test_a_later_process_finds_them_with_the_state_of_the_data(state, place, engine):
    with Checkpoints(place) as checkpoints:
        for step in (3, 4):
            advance(engine, step)
            checkpoints.save(step, engine, state if step == 4 else {"older": 1})
    advance(engine, 99)
    with Checkpoints(place) as again:
        assert again.latest_step() == 4
        assert again.restore(engine) == state
        assert engine.state == {"num_steps": 4}
        np.testing.assert_array_equal(engine.residents.read(EMBED), ARRAYS[EMBED] + 4)
        assert again.restore(engine, step=3) == {"older": 1}
        np.testing.assert_array_equal(engine.residents.read(EMBED), ARRAYS[EMBED] + 3)


class HeldResidents(Residents):
    """Arrays that cannot be read before `gate` is opened."""

    gate = threading.Event()

    def read_share(self, array: ArrayId) -> np.ndarray:
        self.gate.wait(30)
        return super().read_share(array)


def hold(engine: SavedEngine) -> threading.Event:
    residents = engine.residents
    held = HeldResidents(residents.stores, residents.layouts, residents.homes)
    held.gate = threading.Event()
    engine.residents = held
    return held.gate


def test_saving_does_not_wait_and_says_when_arrays_may_change(place, engine, tmp_path):
    gate = hold(engine)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(1, engine)
        assert not engine.pending_save.done()
        assert checkpoints.latest_step() == 1
        gate.set()
        engine.pending_save.result(timeout=30)
        checkpoints.wait()
        assert steps_in(tmp_path / "saved") == {"1"}


def test_a_synchronous_save_is_complete_when_it_returns(place, engine, tmp_path):
    with Checkpoints(place, asynchronous=False) as checkpoints:
        checkpoints.save(1, engine)
        assert engine.pending_save.done()
        assert steps_in(tmp_path / "saved") == {"1"}


@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_a_save_is_waited_for_when_a_step_leaves_no_host_memory_for_it(
    spare_bytes, tmp_path, open_residents
):
    residents = open_residents([Tier.HOST], host_bytes=10_000)
    blocks_bytes = sum(spec.nbytes for spec in residents.specs.values())
    engine = SavedEngine(residents, {})
    peak_bytes = 10_000 - blocks_bytes - spare_bytes
    peaks = {Tier.HOST: peak_bytes, Tier.DEVICE: 0}
    engine.plan = replace(engine.plan, peak_bytes=peaks)
    gate, saved = hold(engine), threading.Event()

    def save() -> None:
        with Checkpoints(tmp_path / "saved") as checkpoints:
            checkpoints.save(1, engine)
            saved.set()

    thread = threading.Thread(target=save)
    thread.start()
    assert saved.wait(timeout=1.0 if spare_bytes < 0 else 30) == (spare_bytes == 0)
    gate.set()
    thread.join()
    assert saved.is_set()


def test_a_failed_save_is_reported_and_the_one_before_is_left(
    place, engine, monkeypatch, tmp_path
):
    with Checkpoints(place) as checkpoints:
        advance(engine, 1)
        checkpoints.save(1, engine)
        checkpoints.wait()
        files = sorted((tmp_path / "saved").rglob("*"))
        ledgers = [engine.residents.stores[tier].ledger for tier in Tier]
        used = [ledger.used_bytes for ledger in ledgers]

        def fail(self: AbstractSave, writer: object) -> None:
            adopt(self, writer)
            raise StorageError(28, "no space", "somewhere")

        adopt = AbstractSave._adopt
        for save in (AbstractSave, type(checkpoints.last_save)):
            monkeypatch.setattr(save, "_adopt", fail)
        checkpoints.save(2, engine)
        engine.pending_save.result(timeout=30)
        with pytest.raises(StorageError, match="no space"):
            for _ in range(3000):
                checkpoints.check()
                time.sleep(0.01)
        monkeypatch.undo()
        # What was written is deleted, and nothing is held.
        left = set((tmp_path / "saved").rglob("*")) - set(files)
        assert [p for p in left if p.is_file() and "state" in p.parts] == []
        assert [ledger.used_bytes for ledger in ledgers] == used
        assert checkpoints.latest_step() == 1
        checkpoints.restore(engine)
        assert engine.state == {"num_steps": 1}
        advance(engine, 2)
        checkpoints.save(2, engine)
        checkpoints.wait()
        assert checkpoints.latest_step() == 2


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Cannot make the folder") as failed:
        Checkpoints(tmp_path / "file" / "saved")
    assert str(tmp_path / "file") in failed.value.filename
