"""Ctrl-C lets the step complete; a second one stops it."""

import os
import signal
from collections.abc import Iterator
from threading import Event, Semaphore, Thread
from typing import Any

import chex
import pytest

from tests.robustness.small import draw, expect_at_rest, on_nvme
from zinf.core.memory.nvme import NvmeStore
from zinf.core.step.whole.fused import FusedProgram

SECONDS_TO_WAIT = 60.0
# Of each Ctrl-C that was handled.
handled = Semaphore(0)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores Ctrl-C."""
    real = signal.signal
    before = real(signal.SIGINT, signal.default_int_handler)

    def install(number: int, handler: Any) -> Any:
        def handle(number: int, frame: Any) -> None:
            handler(number, frame)
            handled.release()

        usual = handler is signal.default_int_handler
        return real(number, handler if usual else handle)

    monkeypatch.setattr(signal, "signal", install)
    yield
    real(signal.SIGINT, before)


def press_ctrl_c(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        # Two signals that are not handled yet are one to the main thread.
        assert handled.acquire(timeout=SECONDS_TO_WAIT)


def interrupt_reads(monkeypatch, times: int = 1) -> None:
    """From the third read of an array on, Ctrl-C is pressed and reads wait for it."""
    real = NvmeStore.read
    is_pressed = Event()
    calls = []

    def press() -> None:
        press_ctrl_c(times)
        is_pressed.set()

    def read(store, array):
        calls.append(array)
        if len(calls) == 3:
            Thread(target=press).start()
        if len(calls) >= 3:
            assert is_pressed.wait(SECONDS_TO_WAIT)
        return real(store, array)

    monkeypatch.setattr(NvmeStore, "read", read)


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 1.0}], ids=str)
def test_the_step_completes_and_is_counted_before_it_ends(
    settings, monkeypatch, tmp_path, start
):
    engine = start(on_nvme(tmp_path / "a", **settings), batch=draw())
    unharmed = start(on_nvme(tmp_path / "b", **settings), batch=draw())
    with monkeypatch.context() as patch:
        interrupt_reads(patch)
        with pytest.raises(KeyboardInterrupt):
            engine.step(draw(1))
    unharmed.step(draw(1))
    expect_at_rest(engine)
    assert engine.num_steps == 1
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]


def test_a_fused_step_completes_too(monkeypatch, start):
    config = {"execution": "fused"}
    engine, unharmed = (start(config, batch=draw()) for _ in range(2))
    runner = engine.prepare(draw())
    real = runner.program

    def step(*arguments):
        press_ctrl_c(1)
        return real.step(*arguments)

    program = FusedProgram(step, real.arrays, real.workspace_bytes, real.flops)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "program", program)
        with pytest.raises(KeyboardInterrupt):
            engine.step(draw(1))
    unharmed.step(draw(1))
    assert engine.num_steps == 1
    expect_at_rest(engine)
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)
    assert engine.step(draw(2))["loss"] == unharmed.step(draw(2))["loss"]


def test_an_evaluation_is_interrupted_and_changes_nothing(monkeypatch, tmp_path, start):
    engine = start(on_nvme(tmp_path / "nvme"), batch=draw())
    expected = engine.evaluate(draw())
    with monkeypatch.context() as patch:
        interrupt_reads(patch)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(draw())
    expect_at_rest(engine)
    assert engine.evaluate(draw()) == expected


def test_a_second_one_stops_the_step(monkeypatch, tmp_path, start):
    config = on_nvme(tmp_path / "nvme", gradient_clipping=1.0)
    engine = start(config, batch=draw())
    with monkeypatch.context() as patch:
        interrupt_reads(patch, times=2)
        with pytest.raises(KeyboardInterrupt):
            engine.step(draw())
    expect_at_rest(engine)
    # It came before the first update, so nothing is half done.
    assert engine.num_steps == 0
    assert engine.step(draw())["step"] == 1
