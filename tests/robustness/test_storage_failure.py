"""A read or write of the NVMe tier that fails loses nothing and leaves nothing."""

import errno
import shutil
from threading import Event
from time import sleep

import chex
import pytest

from tests.robustness.small import (
    content,
    draw,
    expect_at_rest,
    on_nvme,
    with_tight_host,
)
from zinf.executor.passes import Passes
from zinf.memory.nvme import NvmeStore
from zinf.memory.storage_error import StorageError, storage_error
from zinf.prepare.updates import Updates
from zinf.program import ArrayId, Role
from zinf.segment import Segment

CLIPPED = {"gradient_clipping": 1.0}


def fail_call(
    monkeypatch, verb: str, number: int, once: Event | None = None
) -> list[ArrayId]:
    """Makes the `number`-th call (from 1) of a verb of the store fail; lists calls."""
    real = getattr(NvmeStore, verb)
    calls = []

    def call(store, array, *rest):
        calls.append(array)
        if len(calls) == number:
            assert once is None or once.wait(timeout=10)
            raise storage_error("on purpose", errno.EIO, store.folder(array), "broken")
        return real(store, array, *rest)

    monkeypatch.setattr(NvmeStore, verb, call)
    return calls


def updating(monkeypatch) -> Event:
    """Set when the first update begins."""
    begun = Event()

    def noting(real):
        def apply(*arguments):
            begun.set()
            return real(*arguments)

        return apply

    # In its place or not.
    for name in [name for name in vars(Updates) if name.startswith("apply")]:
        monkeypatch.setattr(Updates, name, noting(getattr(Updates, name)))
    return begun


def expect_refused(engine) -> None:
    for refused in (lambda: engine.step(draw()), engine.params, engine.evaluate):
        with pytest.raises(RuntimeError, match="Restore the last checkpoint"):
            refused(*([draw()] if refused == engine.evaluate else []))


def count_calls(start, tmp_path, verb: str) -> int:
    """How often a step that follows another calls a verb."""
    with pytest.MonkeyPatch.context() as patch:
        engine = start(on_nvme(tmp_path / "counted", **CLIPPED), batch=draw())
        engine.step(draw())
        calls = fail_call(patch, verb, -1)
        engine.step(draw())
    return len(calls)


def test_a_read_that_fails_before_the_updates_loses_nothing(
    monkeypatch, tmp_path, start
):
    unharmed = start(on_nvme(tmp_path / "a", **CLIPPED), batch=draw())
    engine = start(on_nvme(tmp_path / "b", **CLIPPED), batch=draw())
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
    verb, monkeypatch, tmp_path, start
):
    engine = start(on_nvme(tmp_path / "nvme", **CLIPPED), batch=draw())
    engine.step(draw(1))
    engine.save(tmp_path / "saved")
    saved = content(engine)
    engine.step(draw(3))
    # Half of what the updates of that step read, or write.
    number = count_calls(start, tmp_path, verb) // 2
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


def test_every_write_of_a_step_may_fail_and_leaves_no_copy(
    monkeypatch, tmp_path, start
):
    engine = start(on_nvme(tmp_path / "nvme", **CLIPPED), batch=draw())
    engine.save(tmp_path / "saved")
    num_writes = count_calls(start, tmp_path, "write")
    for number in range(1, num_writes + 1, 4):
        engine.step(draw())
        with monkeypatch.context() as patch:
            fail_call(patch, "write", number)
            with pytest.raises(StorageError) as caught:
                engine.step(draw())
        assert "nvme write" in caught.value.__notes__[0]
        expect_at_rest(engine)
        engine.restore(tmp_path / "saved")
    assert engine.step(draw())["step"] == 1


def test_every_read_of_a_step_may_fail_and_leaves_no_copy(monkeypatch, tmp_path, start):
    engine = start(on_nvme(tmp_path / "nvme", **CLIPPED), batch=draw())
    engine.save(tmp_path / "saved")
    num_reads = count_calls(start, tmp_path, "read")
    for number in range(1, num_reads + 1, 4):
        engine.step(draw())
        with monkeypatch.context() as patch:
            fail_call(patch, "read", number)
            with pytest.raises(StorageError) as caught:
                engine.step(draw())
        assert "nvme read" in caught.value.__notes__[0]
        expect_at_rest(engine)
        engine.restore(tmp_path / "saved")
    assert engine.step(draw())["step"] == 1


def _fail(*_):
    raise MemoryError


def test_a_step_that_fails_before_the_updates_that_are_due_leaves_them_due(
    monkeypatch, tmp_path, start
):
    unharmed = start(on_nvme(tmp_path / "a", **CLIPPED), batch=draw())
    engine = start(on_nvme(tmp_path / "b", **CLIPPED), batch=draw())
    for each in (unharmed, engine):
        each.step(draw(1))
    with monkeypatch.context() as patch:
        fail_call(patch, "read", 1)
        with pytest.raises(StorageError, match="on purpose"):
            engine.step(draw(2))
    with monkeypatch.context() as patch:
        # Before anything of the plan has run.
        patch.setattr(Passes, "_put", _fail)
        with pytest.raises(MemoryError):
            engine.step(draw(2))
    assert engine.num_steps == 1
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)
    expect_at_rest(engine)


def test_a_step_that_fails_after_the_updates_that_were_due_has_done_them(
    monkeypatch, tmp_path, start
):
    unharmed = start(on_nvme(tmp_path / "a", **CLIPPED), batch=draw())
    engine = start(on_nvme(tmp_path / "b", **CLIPPED), batch=draw())
    for each in (unharmed, engine):
        each.step(draw(1))

    def broken(segment, *arguments):
        # All that was pending is at home by then, or soon.
        sleep(0.5)
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "backward", broken)
        with pytest.raises(ValueError, match="on purpose"):
            engine.step(draw(2))
    assert content(engine) == content(unharmed)
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]
    expect_at_rest(engine)


def test_an_evaluation_that_fails_leaves_no_copy(monkeypatch, tmp_path, start):
    engine = start(on_nvme(tmp_path / "nvme"), batch=draw())
    expected = engine.evaluate(draw())
    with monkeypatch.context() as patch:
        fail_call(patch, "read", 2)
        with pytest.raises(StorageError, match="on purpose"):
            engine.evaluate(draw())
    expect_at_rest(engine)
    assert engine.evaluate(draw()) == expected


def test_a_deleted_file_is_named_and_nothing_is_updated(tmp_path, start):
    engine = start(on_nvme(tmp_path / "nvme", **CLIPPED), batch=draw())
    array = ArrayId(Role.PARAM, "layers/1/w")
    folder = engine.stores.nvme.folder(array)
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    for chunk in [p for p in folder.rglob("*") if p.is_file()]:
        if chunk.name != "zarr.json":
            chunk.unlink()
    with pytest.raises(StorageError, match="layers/1/w") as caught:
        engine.step(draw())
    assert "nvme read" in caught.value.__notes__[0]
    expect_at_rest(engine)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    assert engine.step(draw())["step"] == 1


def test_a_gradient_that_cannot_be_offloaded_leaves_no_copy(
    monkeypatch, tmp_path, start
):
    """Copies on nvme are made by their first write, so a failed one must go too."""
    config = with_tight_host(on_nvme(tmp_path / "nvme", **CLIPPED))
    engine = start(config, batch=draw())
    homes = {a.whole for a in engine.plan.homes}
    real = NvmeStore.write
    seen = []

    def write(store, array, value):
        future = real(store, array, value)
        if array.whole not in homes:
            seen.append(array)
            future.result()
            raise storage_error("on purpose", errno.EIO, store.folder(array), "broken")
        return future

    with monkeypatch.context() as patch:
        patch.setattr(NvmeStore, "write", write)
        with pytest.raises(StorageError, match="on purpose"):
            engine.step(draw())
    assert len(seen) == 1
    expect_at_rest(engine)
    assert engine.step(draw())["step"] == 1


def test_a_restore_that_fails_half_way_is_refused_until_one_succeeds(
    monkeypatch, tmp_path, start
):
    engine = start(on_nvme(tmp_path / "nvme"), batch=draw())
    engine.save(tmp_path / "saved")
    expected = engine.step(draw())["loss"]
    with monkeypatch.context() as patch:
        fail_call(patch, "write", 3)
        with pytest.raises(StorageError, match="on purpose"):
            engine.restore(tmp_path / "saved")
    expect_refused(engine)
    engine.restore(tmp_path / "saved")
    assert engine.step(draw())["loss"] == expected
