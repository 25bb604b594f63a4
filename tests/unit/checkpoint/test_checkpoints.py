"""Checkpoints are kept, found and resumed, and none is lost to whatever happens."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, SavedEngine
from zinf.checkpoint import Checkpoints
from zinf.checkpoint.save import Save
from zinf.memory import StorageError
from zinf.memory.residents import Residents
from zinf.program import ArrayId, Role, Tier

EMBED = ArrayId(Role.PARAM, "embed")


@pytest.fixture
def engine(open_residents) -> SavedEngine:
    return SavedEngine(open_residents([Tier.HOST]), {"num_steps": 0})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "saved", keep=2) as opened:
        yield opened


def advance(engine: SavedEngine, step: int) -> None:
    """What a step does, as far as a checkpoint is concerned."""
    if engine.pending_save is not None:
        engine.pending_save.result()
    engine.residents.write(EMBED, ARRAYS[EMBED] + step)
    engine.state = {"num_steps": step}


def embed(engine: SavedEngine) -> np.ndarray:
    return engine.residents.read(EMBED)


class HeldResidents(Residents):
    """Arrays that cannot be read before `gate` is opened."""

    gate = threading.Event()

    def read_share(self, array: ArrayId) -> np.ndarray:
        self.gate.wait(30)
        return super().read_share(array)


def hold(engine: SavedEngine) -> threading.Event:
    residents = engine.residents
    held = HeldResidents(residents.stores, residents.specs, residents.homes)
    held.gate = threading.Event()
    engine.residents = held
    return held.gate


def test_the_newest_are_kept_and_the_newest_is_restored(checkpoints, engine):
    for step in (5, 10, 15):
        advance(engine, step)
        checkpoints.save(step, engine, {"position": step})
    checkpoints.wait()
    names = {path.name for path in checkpoints.directory.iterdir()}
    assert names == {"10", "15"}
    assert checkpoints.latest_step() == 15
    advance(engine, 99)
    assert checkpoints.restore(engine) == {"position": 15}
    assert engine.state == {"num_steps": 15}
    np.testing.assert_array_equal(embed(engine), ARRAYS[EMBED] + 15)


def test_an_older_one_can_be_restored(checkpoints, engine):
    for step in (1, 2):
        advance(engine, step)
        checkpoints.save(step, engine)
    assert checkpoints.restore(engine, step=1) is None
    assert engine.state == {"num_steps": 1}
    np.testing.assert_array_equal(embed(engine), ARRAYS[EMBED] + 1)


@pytest.mark.parametrize(
    "state", [{"a": [1, None], "b": {"c": b"\x00"}}, b"\x00\xff", None]
)
def test_the_state_of_any_data_iterator_comes_back(state, checkpoints, engine):
    checkpoints.save(1, engine, state)
    assert checkpoints.restore(engine) == state


def test_without_checkpoints_there_is_no_latest_step_and_nothing_to_restore(
    checkpoints, engine
):
    assert checkpoints.latest_step() is None
    with pytest.raises(FileNotFoundError):
        checkpoints.restore(engine)


def test_checkpoints_are_found_by_a_later_process(tmp_path, engine):
    with Checkpoints(tmp_path / "saved") as checkpoints:
        advance(engine, 3)
        checkpoints.save(3, engine)
    advance(engine, 4)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.latest_step() == 3
        checkpoints.restore(engine)
    np.testing.assert_array_equal(embed(engine), ARRAYS[EMBED] + 3)


def test_saving_does_not_wait_and_says_when_arrays_may_change(checkpoints, engine):
    gate = hold(engine)
    checkpoints.save(1, engine)
    assert not engine.pending_save.done()
    gate.set()
    engine.pending_save.result(timeout=30)
    checkpoints.wait()
    assert checkpoints.directory.joinpath("1").exists()


def test_a_synchronous_save_is_complete_when_it_returns(tmp_path, engine):
    with Checkpoints(tmp_path / "saved", asynchronous=False) as checkpoints:
        checkpoints.save(1, engine)
        assert engine.pending_save.done()
        assert checkpoints.directory.joinpath("1").exists()


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
    gate = hold(engine)
    saved = threading.Event()

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
    checkpoints, engine, monkeypatch
):
    advance(engine, 1)
    checkpoints.save(1, engine)
    checkpoints.wait()

    def fail(save):
        (save.directory / "half").write_text("written")
        save.cancel()
        raise StorageError(28, "no space", "somewhere")

    monkeypatch.setattr(Save, "finish", fail)
    checkpoints.save(2, engine)
    engine.pending_save.result(timeout=30)
    with pytest.raises(StorageError, match="no space"):
        for _ in range(3000):
            checkpoints.check()
            time.sleep(0.01)
    monkeypatch.undo()
    assert not list(checkpoints.directory.rglob("half"))
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


KILLED = """
import sys, threading
from pathlib import Path
import jax, numpy as np
from tests.unit.checkpoint.cases import ARRAYS, SavedEngine, homes_on, specs_of
from zinf.checkpoint import Checkpoints
from zinf.memory import open_stores
from zinf.memory.residents import Residents
from zinf.program import Role, Tier

class Stuck(Residents):
    def read_share(self, array):
        if self.is_stuck and array.role != Role.PARAM:
            print("stuck", flush=True)
            threading.Event().wait()
        return super().read_share(array)

stores = open_stores(jax.devices()[0])
residents = Stuck(stores, specs_of(ARRAYS), homes_on([Tier.HOST], ARRAYS))
for array, value in ARRAYS.items():
    residents.write(array, value.copy())
engine = SavedEngine(residents, {"num_steps": 1})
checkpoints = Checkpoints(sys.argv[1])
residents.is_stuck = False
checkpoints.save(1, engine, {"position": 1})
checkpoints.wait()
residents.is_stuck = True
engine.state = {"num_steps": 2}
checkpoints.save(2, engine, {"position": 2})
threading.Event().wait()
"""


def test_killing_the_process_during_a_save_leaves_the_checkpoint_before(
    tmp_path, engine
):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stuck\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    begun = [path.name for path in (tmp_path / "saved").iterdir()]
    assert len(begun) == 2, "the second save had begun"

    advance(engine, 7)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.latest_step() == 1
        assert checkpoints.restore(engine) == {"position": 1}
    assert engine.state == {"num_steps": 1}
    np.testing.assert_array_equal(embed(engine), ARRAYS[EMBED])
