"""Reward functions: what they are given, and what becomes of those that fail."""

import asyncio
import logging
import time
from threading import Barrier, Event, get_ident

import numpy as np
import pytest

from zinf.core.rollouts import Rewards, Samples
from zinf.core.rollouts.calls import AbstractRewardModel

SAMPLES = Samples(
    prompts=["p0", "p0", "p1", "p1"],
    completions=["a", "bb", "ccc", "dddd"],
    completion_ids=[[1], [1, 2], [3], [4, 5]],
    columns={"answer": ["a", "a", "x", "x"]},
)


def rewarded(*functions, **named):
    return Rewards(functions, **named).start(SAMPLES).result()


def length(completions, **_):
    return [len(x) for x in completions]


def test_functions_get_columns_and_are_summed_by_their_weights():
    def correct(prompts, completions, completion_ids, answer):
        assert prompts == SAMPLES.prompts and completion_ids == SAMPLES.completion_ids
        pairs = zip(completions, answer, strict=True)
        return np.array([float(c == a) for c, a in pairs])

    async def half(completions, **_):
        await asyncio.sleep(0)
        return [0.5 if len(c) > 1 else None for c in completions]

    found = rewarded(length, correct, half, weights=[1.0, 10.0, 2.0])
    assert [*found.values] == ["length", "correct", "half"]
    # None is no opinion: the other functions count.
    np.testing.assert_array_equal(found.total, [11.0, 3.0, 4.0, 5.0])
    assert np.isnan(found.values["half"][0])
    both = Rewards([lambda completions: [1.0] * 4, lambda completions: [2.0] * 4])
    assert both.names == ("<lambda>", "<lambda>_2")


def test_functions_run_beside_the_caller():
    threads, goes_on, both = [], Event(), Barrier(2, timeout=30)

    def slow(completions, **_):
        threads.append(get_ident())
        assert goes_on.wait(30)  # The caller has to go on for that.
        return [0.0] * len(completions)

    async def meet(completions, **_):
        both.wait()  # Those that are async wait together.
        return [0.0] * len(completions)

    call = Rewards([slow, meet, meet]).start(SAMPLES)
    goes_on.set()
    np.testing.assert_array_equal(call.result().total, np.zeros(4))
    assert get_ident() not in threads


class Model(AbstractRewardModel):
    """Rewards by the length of a text, and fails for one text."""

    name = "length"

    def check(self, prompts):
        raise NotImplementedError

    def scores(self, samples):
        assert get_ident() == HERE
        return np.array([1.0, np.nan, 3.0, 4.0]), {1: "it is too long"}


HERE = get_ident()


def test_models_reward_in_the_thread_that_asks(caplog):
    rewards = Rewards([length, Model(), length], [1.0, 10.0, 100.0])
    assert rewards.names == ("length", "length_2", "length_3")
    rewards.check([{}], ["line 1"])
    other = Model()
    assert rewards.asking([other]).models == {1: other}
    found = rewards.start(SAMPLES).result()
    assert [*found.values] == [*rewards.names]
    np.testing.assert_array_equal(found.total, [111.0, np.nan, 333.0, 444.0])
    text = "The reward length_2: 1 of 4 completions are left out"
    assert (
        text in caplog.text and "it is too long for the completion 'bb'" in caplog.text
    )


def raising(completions, **_):
    if "bb" in completions:
        raise ZeroDivisionError("no bb")
    return length(completions)


def hanging(completions, **_):
    if "bb" in completions:
        time.sleep(30)
    return length(completions)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raising, "it raised ZeroDivisionError: no bb"),
        (hanging, "it took more than 0.05 seconds"),
        (lambda completions: [1, float("nan"), 3, 4], "it returned a number that is"),
    ],
)
def test_a_completion_whose_reward_fails_is_left_out_by_name(function, reason, caplog):
    with caplog.at_level(logging.WARNING):
        found = rewarded(function, length, timeout=0.05)
    assert np.isnan(found.total).tolist() == [False, True, False, False]
    (text,) = caplog.messages
    assert reason in text and "1 of 4 completions" in text
    assert "the completion 'bb' of the prompt 'p0'" in text


def test_a_completion_without_any_opinion_is_left_out(caplog):
    found = rewarded(lambda completions: [1, None, 2, 3])
    assert np.isnan(found.total).tolist() == [False, True, False, False]
    assert "every reward function returned None" in caplog.text


def stuck(completions, **_):
    time.sleep(30)


@pytest.mark.parametrize(
    ("functions", "error", "text"),
    [
        (
            [lambda completions: [1.0]],
            ValueError,
            r"returned 1;.*4 rewards.*prompt 'p0'",
        ),
        ([lambda completions: 3], ValueError, "returned a int"),
        ([lambda completions: ["x"] * 4], ValueError, "'x'.*a reward is a number"),
        ([lambda completions: [None] * 4], ValueError, "No completion.*'p0'"),
        ([lambda completions: 1 / 0], ValueError, "No completion"),
        ([stuck], RuntimeError, "again and again.*prompt 'p1'"),
    ],
)
def test_rewards_that_no_step_can_use_are_refused(functions, error, text):
    with pytest.raises(error, match=text):
        rewarded(*functions, timeout=0.02)


def test_a_missing_column_is_named_before_anything_runs():
    def correct(completions, anwser, tolerance=0.1, **_):
        return [1.0] * len(completions)

    rewards = Rewards([correct])
    text = r"correct takes 'anwser', and line 1 has no.*Did you mean 'answer'"
    with pytest.raises(ValueError, match=text):
        rewards.check([{"answer": 1}], ["line 1"])
    rewards.check([{"anwser": 1}], ["line 1"])
    with pytest.raises(ValueError, match="no reward function"):
        Rewards([])
    with pytest.raises(ValueError, match="2 numbers.*1 reward"):
        Rewards([length], [1.0, 2.0])
