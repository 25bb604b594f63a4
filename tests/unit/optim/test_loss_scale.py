"""The loss scale follows DeepSpeed's rules, and survives a checkpoint."""

import json
import random

import pytest

from zinf.core.optim.loss_scale import LossScale, LossScaleSettings


def start(**changes):
    fields = {"initial_scale": 2.0**16, "window": 4, "hysteresis": 2} | changes
    return LossScale.initial(LossScaleSettings(**fields))


def run(state, overflows):
    scales = []
    for overflow in overflows:
        state = state.update(overflow)
        scales.append(state.scale)
    return state, scales


BAD, GOOD = True, False


@pytest.mark.parametrize(
    ("changes", "overflows", "powers"),
    [
        # The first overflow uses up patience, and each further one halves.
        ({}, [BAD] * 3, [16, 15, 14]),
        ({"hysteresis": 1}, [BAD] * 2, [15, 14]),
        # DeepSpeed counts the clean steps before the present one: the first growth
        # comes with step number window + 1, the next a window later.
        ({}, [GOOD] * 9, [16] * 4 + [17] * 4 + [18]),
        # An overflow starts the window again.
        ({}, [GOOD, GOOD, BAD] + [GOOD] * 5, [16] * 7 + [17]),
        # Growth restores patience: the first of the last two overflows uses it up.
        ({}, [BAD] + [GOOD] * 5 + [BAD] * 2, [16] * 5 + [17] * 2 + [16]),
        # A clean step restores patience only if asked.
        ({}, [BAD, GOOD] * 3, [16] * 2 + [15] * 2 + [14] * 2),
        ({"consecutive_hysteresis": True}, [BAD, GOOD] * 3, [16] * 6),
        ({"dynamic": False}, [BAD] * 5 + [GOOD] * 5, [16] * 10),
    ],
)
def test_the_scale_of_each_step_is_that_of_deepspeed(changes, overflows, powers):
    state, scales = run(start(**changes), overflows)
    assert scales == [2.0**power for power in powers]
    assert state.step == len(overflows)
    assert state.inverse == 2.0 ** -powers[-1]


def test_scale_never_falls_below_the_minimum_and_overflow_there_is_an_error():
    state = start(initial_scale=3.0, min_scale=2.0, hysteresis=1).update(BAD)
    assert state.scale == 2.0
    with pytest.raises(FloatingPointError, match="`fp16.min_loss_scale`"):
        state.update(BAD)


def test_a_resumed_scale_goes_on_as_if_never_stopped():
    draw = random.Random(0)
    overflows = [draw.random() < 0.2 for _ in range(200)]
    first = start(min_scale=2.0**-20)
    _, whole = run(first, overflows)
    middle, before = run(first, overflows[:77])
    stored = json.loads(json.dumps(middle.to_dict()))
    _, after = run(LossScale.from_dict(first.settings, stored), overflows[77:])
    assert before + after == whole
    assert len(set(whole)) > 3
