"""A read or write of the NVMe tier that fails loses nothing and leaves nothing."""

from collections.abc import Callable
from errno import EIO
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import chex
import pytest

from tests.robustness.small import content, draw, expect_at_rest, on_nvme
from zinf import Engine
from zinf.core.memory.nvme import NvmeStore
from zinf.core.memory.storage_error import StorageError, storage_error
from zinf.core.program import ArrayId, Role
from zinf.core.segment import Segment
from zinf.core.step.run.passes import Passes
from zinf.core.step.updates import Updates

CLIPPED = {"gradient_clipping": 1.0}
WEIGHT = ArrayId(Role.PARAM, "layers/1/w")
Start = Callable[..., Engine]


def fail_call(
    monkeypatch: pytest.MonkeyPatch, verb: str, number: int, once: Event | None = None
) -> list[ArrayId]:
    """Makes the `number`-th call (from 1) of a verb of the store fail; lists calls."""
    real = getattr(NvmeStore, verb)
    calls: list[ArrayId] = []

    def call(store: NvmeStore, array: ArrayId, *rest: Any) -> Any:
        calls.append(array)
        if len(calls) == number:
            assert once is None or once.wait(timeout=10)
            raise storage_error("on purpose", EIO, store.folder(array), "broken")
        return real(store, array, *rest)

    monkeypatch.setattr(NvmeStore, verb, call)
    return calls


def updating(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when the first update begins."""
    begun = Event()
    # In its place or not.
    for name in [name for name in vars(Updates) if name.startswith("apply")]:
        real = getattr(Updates, name)

        def apply(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            begun.set()
            return real(*arguments)

        monkeypatch.setattr(Updates, name, apply)
    return begun


def expect_refused(engine: Engine) -> None:
    for ask in (
        lambda: engine.step(draw()),
        engine.params,
        lambda: engine.evaluate(draw()),
    ):
        with pytest.raises(RuntimeError, match="Restore the last checkpoint"):
            ask()


@pytest.fixture
def engine(start: Start, tmp_path: Path) -> Engine:
    return start(on_nvme(tmp_path / "nvme", **CLIPPED), batch=draw())


@pytest.fixture
def unharmed(start: Start, tmp_path: Path) -> Engine:
    """The same without failures."""
    return start(on_nvme(tmp_path / "unharmed", **CLIPPED), batch=draw())


def count_calls(unharmed: Engine, verb: str) -> int:
    """How often a step that follows another calls a verb."""
    with pytest.MonkeyPatch.context() as patch:
        unharmed.step(draw())
        calls = fail_call(patch, verb, -1)
        unharmed.step(draw())
    return len(calls)


def test_a_read_that_fails_before_the_updates_loses_nothing(
    monkeypatch, engine, unharmed
):
    before = content(engine)
    with monkeypatch.context() as patch:
        fail_call(patch, "read", 2)
        with pytest.raises(StorageError, match="on purpose") as caught:
            engine.step(draw())
    (note,) = caught.value.__notes__
    assert "in instruction #" in note
    assert "on the link nvme read: fetch param/" in note
    expect_at_rest(engine)
    assert content(engine) == before
    assert engine.num_steps == 0
    assert engine.step(draw())["loss"] == unharmed.step(draw())["loss"]
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failure_between_updates_is_refused_until_restored(
    verb, monkeypatch, tmp_path, engine, unharmed
):
    engine.step(draw(1))
    engine.save(tmp_path / "saved")
    saved = content(engine)
    engine.step(draw(3))
    # Half of what the updates of that step read, or write.
    number = count_calls(unharmed, verb) // 2
    with monkeypatch.context() as patch:
        fail_call(patch, verb, number, once=updating(patch))
        with pytest.raises(StorageError, match="on purpose") as caught:
            engine.step(draw(2))
    assert any("in instruction #" in note for note in caught.value.__notes__)
    expect_at_rest(engine)
    expect_refused(engine)
    engine.restore(tmp_path / "saved")
    assert content(engine) == saved
    assert engine.num_steps == 1
    assert engine.step(draw(2))["step"] == 2
    expect_at_rest(engine)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_every_call_of_a_step_may_fail_and_leaves_no_copy(
    verb, monkeypatch, tmp_path, engine, unharmed
):
    engine.save(tmp_path / "saved")
    for number in range(1, count_calls(unharmed, verb) + 1, 6):
        engine.step(draw())
        with monkeypatch.context() as patch:
            fail_call(patch, verb, number)
            with pytest.raises(StorageError) as caught:
                engine.step(draw())
        assert f"nvme {verb}" in caught.value.__notes__[0]
        expect_at_rest(engine)
        engine.restore(tmp_path / "saved")
    assert engine.step(draw())["step"] == 1


def test_a_step_that_fails_before_the_updates_that_are_due_leaves_them_due(
    monkeypatch, engine, unharmed
):
    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    for each in (unharmed, engine):
        each.step(draw(1))
    with monkeypatch.context() as patch:
        fail_call(patch, "read", 1)
        with pytest.raises(StorageError, match="on purpose"):
            engine.step(draw(2))
    with monkeypatch.context() as patch:
        # Before anything of the plan has run.
        patch.setattr(Passes, "_put", out_of_memory)
        with pytest.raises(MemoryError):
            engine.step(draw(2))
    assert engine.num_steps == 1
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)
    expect_at_rest(engine)


def test_a_step_that_fails_after_the_updates_that_were_due_has_done_them(
    monkeypatch, engine, unharmed
):
    def broken(*_: Any) -> None:
        # All that was pending is at home by then, or soon.
        sleep(0.5)
        raise ValueError("on purpose")

    for each in (unharmed, engine):
        each.step(draw(1))
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "backward", broken)
        with pytest.raises(ValueError, match="on purpose"):
            engine.step(draw(2))
    assert content(engine) == content(unharmed)
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]
    expect_at_rest(engine)


def test_an_evaluation_that_fails_leaves_no_copy(monkeypatch, engine):
    expected = engine.evaluate(draw())
    with monkeypatch.context() as patch:
        fail_call(patch, "read", 2)
        with pytest.raises(StorageError, match="on purpose"):
            engine.evaluate(draw())
    expect_at_rest(engine)
    assert engine.evaluate(draw()) == expected


def test_a_restore_that_fails_half_way_is_refused_until_one_succeeds(
    monkeypatch, tmp_path, engine
):
    engine.save(tmp_path / "saved")
    expected = engine.step(draw())["loss"]
    with monkeypatch.context() as patch:
        fail_call(patch, "write", 3)
        with pytest.raises(StorageError, match="on purpose"):
            engine.restore(tmp_path / "saved")
    expect_refused(engine)
    engine.restore(tmp_path / "saved")
    assert engine.step(draw())["loss"] == expected
