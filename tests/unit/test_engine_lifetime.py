"""Who may use an engine when, and what is left of it afterwards."""

import gc
import os
import threading
from pathlib import Path

import chex
import jax
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import content, draw, init, loss_fn, on_nvme
from zinf.checkpoint import Checkpoints
from zinf.core.engine.turn import ConcurrentUseError
from zinf.core.memory import StorageError, wait_for_closing

FUSED = {"execution": "fused"}


def initialize(config, **rest):
    return zinf.initialize(loss_fn, init, optax.adam(1e-2), config, **rest)


def nvme_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("nvme ")]


def open_files(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return [target for target in targets if target.startswith(str(folder))]


class Inside:
    """A thread that is held inside `engine.<method>` until it is let go."""

    def __init__(self, engine, monkeypatch, method="step"):
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.result = None
        owner, name = engine._runners.current, "step"
        real = owner.step
        if method == "evaluate":
            evaluate = engine._evaluation(draw(1), "master")
            owner, name, real = engine, "_evaluation", lambda *_: evaluate

        def held(*arguments, **named):
            self.entered.set()
            assert self.may_go.wait(60)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, held)

        def run():
            self.result = getattr(engine, method)(draw(1))

        self.thread = threading.Thread(target=run, name="first")
        self.thread.start()
        assert self.entered.wait(60)

    def go(self):
        self.may_go.set()
        self.thread.join()
        return self.result


def test_a_second_caller_is_told_who_is_inside_and_touches_nothing(
    tmp_path, monkeypatch
):
    with (
        initialize(on_nvme(tmp_path / "a"), batch=draw()) as engine,
        initialize(on_nvme(tmp_path / "b"), batch=draw()) as alone,
    ):
        inside = Inside(engine, monkeypatch)
        calls = {
            "step": lambda: engine.step(draw(2)),
            "evaluate": lambda: engine.evaluate(draw()),
            "params": engine.params,
            "model_state": engine.model_state,
            "save": lambda: engine.save(tmp_path / "saved"),
            "restore": lambda: engine.restore(tmp_path / "saved"),
            "residents": lambda: engine.residents,
            "prepare": lambda: engine.prepare(draw(size=8)),
            "flush": engine.flush,
            "scalars": engine.scalars,
            "close": engine.close,
        }
        for name, call in calls.items():
            with pytest.raises(ConcurrentUseError) as caught:
                call()
            said = str(caught.value)
            assert f"engine.{name} was called in thread 'MainThread'" in said
            assert "thread 'first' was inside engine.step" in said
        assert not (tmp_path / "saved").exists()
        assert inside.go()["step"] == engine.num_steps == 1
        alone.step(draw(1))
        assert content(engine) == content(alone)
        assert engine.step(draw(2))["loss"] == alone.step(draw(2))["loss"]


def test_calls_beside_an_evaluation_and_from_within_a_step_are_refused(monkeypatch):
    with initialize(FUSED, batch=draw()) as engine:
        with monkeypatch.context() as patch:
            inside = Inside(engine, patch, "evaluate")
            with pytest.raises(ConcurrentUseError, match=r"inside engine\.evaluate"):
                engine.step(draw())
            assert inside.go() > 0
        assert engine.num_steps == 0
        runner = engine._runners.current
        real = runner.step

        def nested(*arguments, **named):
            with pytest.raises(ConcurrentUseError, match="in the same thread"):
                engine.params()
            return real(*arguments, **named)

        monkeypatch.setattr(runner, "step", nested)
        assert engine.step(draw())["step"] == 1


def test_a_dropped_engine_gives_back_threads_files_lock_and_bytes(tmp_path):
    config = on_nvme(tmp_path / "nvme", gradient_clipping=1.0)
    gc.collect()
    gc.disable()  # the engine is in no cycle: its last reference is enough
    try:
        engine = initialize(config, batch=draw())
        loss = engine.step(draw())["loss"]
        stores = engine.stores
        assert nvme_threads()
        assert open_files(tmp_path / "nvme")
        del engine
        # Made again without a batch, as by a notebook cell that runs once more.
        engine = initialize(config)
        assert engine.step(draw())["loss"] == loss
        assert stores.device.ledger.used_bytes == stores.host.ledger.used_bytes == 0
        del engine
        wait_for_closing()
    finally:
        gc.enable()
    assert nvme_threads() == []
    assert open_files(tmp_path / "nvme") == []


def test_an_engine_that_only_a_cycle_refers_to_is_no_obstacle(tmp_path):
    config = on_nvme(tmp_path / "nvme")
    cycle = [initialize(config, batch=draw())]
    cycle.append(cycle)
    del cycle
    with initialize(config, batch=draw()) as engine:
        assert engine.step(draw())["step"] == 1


def test_an_engine_on_the_same_folder_is_told_what_to_close(tmp_path):
    config, losses = on_nvme(tmp_path / "nvme"), []
    with initialize(config, batch=draw()) as engine:
        told = r"in use by another engine of this process.*engine\.close\(\)"
        with pytest.raises(StorageError, match=told):
            initialize(config, batch=draw())
        losses.append(engine.step(draw())["loss"])
    with pytest.raises(RuntimeError, match="was closed"):
        engine.step(draw())
    # A closed engine leaves its folder to the next.
    with initialize(config, batch=draw()) as engine:
        losses.append(engine.step(draw())["loss"])
    assert losses[0] == losses[1]


def test_an_engine_that_a_traceback_refers_to_can_be_closed(tmp_path):
    """As in a notebook, where the last error stays."""
    gc.collect()  # engines of other tests
    config = on_nvme(tmp_path / "nvme")
    engine = initialize(config, batch=draw())
    with pytest.raises(ValueError, match="not an array") as kept:
        engine.step({"x": "text"})
    engine = initialize(config)
    with pytest.raises(StorageError, match=r"zinf\.close_all\(\)"):
        engine.step(draw())
    assert zinf.close_all() == 1
    assert engine.step(draw())["step"] == 1
    assert zinf.close_all() == 1
    assert zinf.close_all() == 0
    assert kept.value.args


def test_an_engine_is_closed_once_the_save_of_it_is_done(tmp_path):
    """Dropped in the middle of a save in the background, which then still completes."""
    engine = initialize(FUSED, batch=draw())
    engine.step(draw())
    expected = jax.tree.map(np.copy, engine.params())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, engine)
        del engine
    wait_for_closing()
    with initialize(FUSED, batch=draw()) as resumed:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.restore(resumed)
        chex.assert_trees_all_equal(resumed.params(), expected, strict=True)


def test_a_forked_child_closes_nothing_of_its_parent(tmp_path):
    engine = initialize(on_nvme(tmp_path / "nvme"), batch=draw())
    before = engine.evaluate(draw())
    finalizer = engine._closing
    process, name = finalizer.peek()[2][0], finalizer.peek()[1]
    assert process == os.getpid()
    name(process + 1, *finalizer.peek()[2][1:])  # as a child would run it
    wait_for_closing()
    assert engine.evaluate(draw()) == before
    engine.close()
