"""Whatever fails in a step: it is named, and training resumes with the same losses."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EACCES, EAGAIN, EINTR, EIO, EMFILE, ENOENT, ENOSPC, EROFS, ETIMEDOUT
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.clock import Clock, still
from tests.marks import slow_except
from tests.robustness import small
from tests.robustness.faults import (
    BlockLayer,
    Gate,
    Rule,
    before,
    delay,
    fail,
    flip_bit,
    move_at_most,
    move_nothing,
    open_files,
    pretend,
    read_zeros,
)
from tests.robustness.faulty_store import eventually
from tests.robustness.small import BATCH, expect_at_rest, loss_fn, on_nvme
from zinf import Engine
from zinf.memory.nvme import drive, open_file
from zinf.memory.storage_error import StorageError
from zinf.program import ArrayId, Role

# Weights are 256 KiB, which do not go through the page cache; biases do.
DIM = 256
NUM_STEPS = 5
STALL_SECONDS = 0.5
WEIGHT = ArrayId(Role.PARAM, "layers/1/w")


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(k, (DIM, DIM)) * 0.05 for k in keys]
    layers = [{"w": w, "b": jnp.zeros(DIM)} for w in weights[:2]]
    return {"layers": layers, "out": weights[2]}


def draw(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((BATCH, DIM), np.float32)
    return {"x": x, "y": np.sin(x)}


def config_of(folder: Path, **memory: Any) -> dict[str, Any]:
    config = on_nvme(folder)
    config["memory"] |= {"checksums": "full"} | memory
    return config


def losses(engine: Engine, first: int, last: int = NUM_STEPS) -> list[float]:
    return [engine.step(draw(step))["loss"] for step in range(first, last + 1)]


@dataclass
class Trained:
    """An engine on a faulty drive after two steps, which are saved, and a third.

    So the next step begins with updates that are due, if any are left to it.
    """

    engine: Engine
    layer: BlockLayer
    saved: Path
    folder: Path

    def expect_resumes(self, expected: list[float]) -> None:
        """Without faults it goes on from the checkpoint as if nothing had been."""
        self.engine.restore(self.saved)
        assert losses(self.engine, 3) == expected[2:]
        self.expect_at_rest()

    def expect_at_rest(self) -> None:
        expect_at_rest(self.engine)
        assert open_files(self.folder / "arrays") == []


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Iterator[list[float]]:
    """The losses of an undisturbed run."""
    config = config_of(tmp_path_factory.mktemp("undisturbed") / "nvme")
    engine = zinf.initialize(loss_fn, init, optax.adam(1e-2), config, batch=draw(0))
    yield losses(engine, 1)
    engine.close()


@pytest.fixture
def layer(monkeypatch) -> BlockLayer:
    """What drives that are opened from now on ask."""
    layer = BlockLayer()
    monkeypatch.setattr(drive, "System", lambda: layer.system)
    return layer


@pytest.fixture
def train(layer, start, tmp_path) -> Callable[..., Trained]:
    def train(**memory: Any) -> Trained:
        folder = tmp_path / "nvme"
        config = config_of(folder, **memory)
        engine = start(config, params=init, batch=draw(0))
        losses(engine, 1, 2)
        engine.save(tmp_path / "saved")
        losses(engine, 3, 3)
        return Trained(engine, layer, tmp_path / "saved", folder)

    return train


# The calls of a step that are refused: the first, one in the middle, and all.
REFUSED = {
    "the first read": (Rule("preadv", fail(EIO)), EIO),
    "reads after the tenth": (Rule("preadv", fail(EIO), first=10), EIO),
    "reads of large arrays": (
        Rule("preadv", fail(EIO), when=lambda c: c.memory.size >= 4 * DIM**2),
        EIO,
    ),
    "reads for now": (Rule("preadv", fail(EAGAIN)), EAGAIN),
    "the first write": (Rule("pwritev", fail(EIO), times=1), EIO),
    "the fifth write": (Rule("pwritev", fail(EIO), first=5, times=1), EIO),
    "the last writes, there is no room": (
        Rule("pwritev", fail(ENOSPC), first=10),
        ENOSPC,
    ),
    "opening": (Rule("open", fail(EACCES)), EACCES),
    "opening for writes": (
        Rule("open", fail(EROFS), when=lambda c: bool(c.arguments[1] & os.O_RDWR)),
        EROFS,
    ),
    "opening after the twentieth": (Rule("open", fail(EMFILE), first=20), EMFILE),
    "the size of a file": (Rule("stat", fail(EIO), first=8), EIO),
    "zeros in place of parameters": (Rule("preadv", read_zeros), EIO),
    "a wrong bit": (Rule("preadv", flip_bit(3), first=4), EIO),
    "transfers that do not come on": (Rule("preadv pwritev", move_nothing), EIO),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fault",
    slow_except(["the first read", "the fifth write", "opening for writes"], REFUSED),
)
def test_a_step_that_fails_is_done_again_from_the_checkpoint(fault, train, expected):
    rule, code = REFUSED[fault]
    trained = train()
    with trained.layer.broken(rule):
        with pytest.raises(StorageError) as caught:
            trained.engine.step(draw(4))
    assert caught.value.errno == code
    assert caught.value.filename.startswith(str(trained.folder / "arrays"))
    assert any("in instruction #" in note for note in caught.value.__notes__)
    trained.expect_at_rest()
    trained.expect_resumes(expected)


@pytest.mark.parametrize("first", slow_except([4], [1, 4, 9]))
@pytest.mark.parametrize("deed", [pretend, flip_bit(5)], ids=["nothing", "a wrong bit"])
def test_a_write_that_was_none_is_found_in_the_next_step(deed, first, train, expected):
    trained = train()
    with trained.layer.broken(Rule("pwritev", deed, first=first, times=1)):
        with pytest.raises(StorageError, match="not what was written"):
            assert trained.engine.step(draw(4))["loss"] == expected[3]
            trained.engine.step(draw(5))
    trained.expect_at_rest()
    trained.expect_resumes(expected)


HARMLESS: dict[str, Rule] = {
    "signals": Rule("open preadv pwritev", fail(EINTR), times=9),
    "short transfers": Rule("preadv pwritev", move_at_most(5001)),
    "slow transfers": Rule("preadv pwritev", delay(0.002)),
}


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_short_or_slow_changes_no_loss(fault, train, expected):
    trained = train()
    with trained.layer.broken(HARMLESS[fault]):
        assert losses(trained.engine, 4) == expected[3:]
    trained.expect_at_rest()


@pytest.fixture
def clock() -> Iterator[Clock]:
    """By which drives know how long the kernel has not answered."""
    with still("monotonic", drive, open_file) as clock:
        yield clock


@pytest.mark.parametrize("call", ["preadv", "pwritev", "open"])
def test_a_drive_that_stalls_in_a_step_fails_it_in_time(call, clock, train, expected):
    gate = Gate()
    trained = train(stall_seconds=STALL_SECONDS)
    files = f"{trained.engine.stores.nvme.folder(WEIGHT)}/*"

    def stall() -> None:
        gate.wait()
        clock.advance(2 * STALL_SECONDS)

    Thread(target=stall).start()
    with trained.layer.broken(Rule(call, gate, path=files)):
        with pytest.raises(StorageError, match="memory.stall_seconds is 0.5") as caught:
            trained.engine.step(draw(4))
        assert caught.value.errno == ETIMEDOUT
        gate.open()
    # Until its threads have their answers, nothing more is asked of the drive.
    drives = trained.engine.stores.nvme._drives
    eventually(lambda: not any(x.is_stalled for x in drives))
    trained.expect_resumes(expected)


def _each_chunk(change: Callable[[Path], object]) -> Callable[[Engine], None]:
    def do(engine: Engine) -> None:
        for file in engine.stores.nvme.chunk_files(WEIGHT):
            change(file)

    return do


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[1000] ^= 16
    file.write_bytes(content)


CHANGED: dict[str, tuple[Callable[[Engine], None], int]] = {
    "truncated": (_each_chunk(lambda file: os.truncate(file, 4096)), EIO),
    "extended": (_each_chunk(lambda file: os.truncate(file, 2**20)), EIO),
    "deleted": (_each_chunk(Path.unlink), ENOENT),
    "another bit": (_each_chunk(_flip), EIO),
}


@pytest.mark.parametrize("change", slow_except(["deleted", "another bit"], CHANGED))
def test_a_file_that_is_changed_in_mid_step_is_not_trained_on(change, train, expected):
    do, code = CHANGED[change]
    trained = train()
    copied = trained.folder.parent / "copied"
    shutil.copytree(trained.saved, copied)
    # What no update has written since shares its files with the tier.
    latest = trained.folder.parent / "latest"
    trained.engine.save(latest)
    changing = before(lambda: do(trained.engine))
    is_other = f"{trained.engine.stores.nvme.folder(WEIGHT).parent}/*"
    with trained.layer.broken(Rule("open", changing, path=is_other, times=1)):
        with pytest.raises(StorageError) as caught:
            trained.engine.step(draw(4))
    assert caught.value.errno == code
    files = trained.engine.stores.nvme.chunk_files(WEIGHT)
    assert caught.value.filename in map(str, files)
    trained.expect_at_rest()
    if code == EIO:
        # What changes a file behind their backs changes it for both, and loading says
        # so.
        with pytest.raises(StorageError, match="Cannot read param/layers/1/w"):
            trained.engine.restore(latest)
        trained.saved = copied
    trained.expect_resumes(expected)


def test_a_tier_that_is_deleted_in_mid_run_is_replaced_by_a_new_engine(
    train, start, expected
):
    trained = train()
    shutil.rmtree(trained.folder / "arrays")
    with pytest.raises(StorageError, match="Something deleted files"):
        trained.engine.step(draw(4))
    trained.expect_at_rest()
    trained.engine.close()
    engine = start(config_of(trained.folder), params=init, batch=draw(0))
    engine.restore(trained.saved)
    assert losses(engine, 3) == expected[2:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("call", "code"),
    [("open", EACCES), ("allocate", ENOSPC), ("pwritev", EIO), ("pwritev", EROFS)],
)
@pytest.mark.parametrize("first", slow_except([7], [1, 7]))
def test_a_fault_at_the_start_is_named_and_the_folder_can_be_used_at_once(
    call, code, first, layer, start, tmp_path, expected
):
    config = config_of(tmp_path / "nvme")
    with layer.broken(Rule(call, fail(code), first=first)):
        with pytest.raises(StorageError) as caught:
            start(config, params=init, batch=draw(0))
    assert caught.value.errno == code
    assert caught.value.filename.startswith(str(tmp_path / "nvme"))
    assert open_files(tmp_path / "nvme") == []
    engine = start(config, params=init, batch=draw(0))
    assert losses(engine, 1, 2) == expected[:2]


def test_a_restore_that_fails_can_be_done_again(train, expected):
    trained = train()
    with trained.layer.broken(Rule("pwritev", fail(EIO), first=3)):
        with pytest.raises(StorageError):
            trained.engine.restore(trained.saved)
    trained.expect_at_rest()
    trained.expect_resumes(expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("call", "code"), [("allocate", ENOSPC), ("open", EROFS), ("pwritev", EIO)]
)
def test_a_gradient_that_finds_no_room_leaves_nothing(
    call, code, layer, start, tmp_path
):
    """What has no place on the host is put into files that the step makes."""
    engines = []
    for name in "ab":
        config = on_nvme(tmp_path / name, gradient_clipping=1.0)
        engines.append(start(small.with_tight_host(config), batch=small.draw()))
    broken, unharmed = engines
    homes = [file for a in broken.residents.specs for file in files_of(broken, a)]
    numbers = {file.parent.name for file in homes}
    rule = Rule(call, fail(code), when=lambda c: c.path.parent.name not in numbers)
    with layer.broken(rule):
        with pytest.raises(StorageError) as caught:
            broken.step(small.draw())
    assert caught.value.errno == code
    expect_at_rest(broken)
    assert broken.step(small.draw())["loss"] == unharmed.step(small.draw())["loss"]
    expect_at_rest(broken)


def files_of(engine: Engine, array: ArrayId) -> list[Path]:
    assert engine.stores.nvme is not None
    return engine.stores.nvme.chunk_files(array)
