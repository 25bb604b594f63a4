"""The loss scale follows DeepSpeed's rules, and survives a checkpoint."""

import json
import random

import pytest

from zinf.optim.loss_scale import LossScale, LossScaleSettings


def settings(**changes):
    fields = {"initial_scale": 2.0**16, "window": 4, "hysteresis": 2} | changes
    return LossScaleSettings(**fields)


def run(state, overflows):
    scales = []
    for overflow in overflows:
        state = state.update(overflow)
        scales.append(state.scale)
    return state, scales


def test_first_overflow_only_uses_up_patience_and_the_second_halves():
    _, scales = run(LossScale.initial(settings()), [True, True, True])
    assert scales == [2.0**16, 2.0**15, 2.0**14]


def test_without_hysteresis_every_overflow_halves():
    _, scales = run(LossScale.initial(settings(hysteresis=1)), [True, True])
    assert scales == [2.0**15, 2.0**14]


def test_scale_doubles_every_window_of_clean_steps():
    # DeepSpeed counts the clean steps before the present one: the first growth comes
    # with step number window + 1, the next a window later.
    _, scales = run(LossScale.initial(settings()), [False] * 9)
    assert scales == [2.0**16] * 4 + [2.0**17] * 4 + [2.0**18]


def test_an_overflow_starts_the_window_again():
    _, scales = run(LossScale.initial(settings()), [False, False, True] + [False] * 5)
    assert scales == [2.0**16] * 7 + [2.0**17]


def test_growth_restores_patience():
    state, _ = run(LossScale.initial(settings()), [True] + [False] * 4)
    assert state.patience == 1
    state, _ = run(state, [False])
    assert state.patience == 2


def test_consecutive_hysteresis_restores_patience_at_any_clean_step():
    overflows = [True, False] * 3
    _, kept = run(LossScale.initial(settings(consecutive_hysteresis=True)), overflows)
    _, spent = run(LossScale.initial(settings()), overflows)
    assert kept == [2.0**16] * 6
    assert spent == [2.0**16] * 2 + [2.0**15] * 2 + [2.0**14] * 2


def test_scale_never_falls_below_the_minimum_and_overflow_there_is_an_error():
    state = LossScale.initial(settings(initial_scale=3.0, min_scale=2.0, hysteresis=1))
    state = state.update(True)
    assert state.scale == 2.0
    with pytest.raises(FloatingPointError, match="`fp16.min_loss_scale`"):
        state.update(True)


def test_a_static_scale_never_changes():
    state = LossScale.initial(settings(dynamic=False, initial_scale=128))
    state, scales = run(state, [True] * 5 + [False] * 5)
    assert scales == [128.0] * 10
    assert state.step == 10
    assert state.inverse == 1 / 128


def test_a_resumed_scale_goes_on_as_if_never_stopped():
    draw = random.Random(0)
    overflows = [draw.random() < 0.2 for _ in range(200)]
    start = LossScale.initial(settings(min_scale=2.0**-20))
    _, whole = run(start, overflows)
    middle, first = run(start, overflows[:77])
    stored = json.loads(json.dumps(middle.to_dict()))
    _, second = run(LossScale.from_dict(start.settings, stored), overflows[77:])
    assert first + second == whole
    assert len(set(whole)) > 3
