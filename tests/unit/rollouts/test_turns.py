"""Completions of several turns, with replies of an environment between them."""

import logging
import re
import time

import numpy as np
import pytest

from tests.unit.rollouts.test_rollouts import (
    DIFFERENCE,
    END,
    LETTERS,
    Drawing,
    config_on,
    numbers,
    rollouts,
    train,
)
from zinf.core.config.grpo import Grpo
from zinf.core.rollouts import Environment, Prompt
from zinf.core.rollouts.asking import WrongAnswers


def ids_of(text):
    return [LETTERS.index(letter) for letter in text]


def environment(function, **named):
    return Environment(function, ids_of, **named)


def echo(completions, turns, seeds, **_):
    """Replies twice, with a letter by chance."""
    return [
        None if turn > 2 else f" {'xyz'[seed % 3]}{completion[-1:]}"
        for completion, turn, seed in zip(completions, turns, seeds, strict=True)
    ]


FEW = {"num_generations": 4, "max_completion_length": 16}


def talks(function=echo, *, settings=None, most=None, **named):
    named = {"length": 33} | named
    made = Grpo(**FEW | (settings or {}))
    found = environment(function, max_replies=most)
    return rollouts(made, environment=found, **named)


def test_replies_join_the_tokens_and_no_part_of_the_loss(tmp_path):
    seen, engine = {}, Drawing()

    def keep(prompts, completions, completion_ids, **_):
        seen.update(prompts=prompts, texts=completions, ids=completion_ids)
        return [float(c.count("e")) for c in completions]

    # Everything that a loss may weigh by, at once.
    changes = {"importance_sampling_mode": "token_mask", "top_entropy_quantile": 0.99}
    data = talks(settings=changes, rewards=keep, texts=tmp_path / "texts.jsonl")
    batch = next(iter(data.of(engine)))
    by_text = {p.shown: p for p in data.prompts}
    read = [*engine.read]
    num_replies = 0
    for row, (shown, ids) in enumerate(zip(seen["prompts"], seen["ids"], strict=True)):
        start, stop = len(by_text[shown].tokens), len(by_text[shown].tokens) + len(ids)
        tokens = batch["input_ids"][row]
        assert tokens[start:stop].tolist() == ids and len(ids) <= 16
        # Behind each end of a turn is a reply of two tokens or one, if a turn follows.
        is_own, place = np.zeros(33, np.bool_), start
        while place < stop:
            end = place
            while tokens[end] != END and end < stop - 1:
                end += 1
            is_own[place : end + 1] = True
            place = end + 1
            if place < stop:
                # The model read all before, as it was drawn, once more.
                while tokens[:place].tolist() not in read:
                    place += 1
                num_replies += 1
                assert LETTERS[tokens[end + 1]] == " "
        labels = batch["labels"][row] != -100
        np.testing.assert_array_equal(labels, is_own)
        for name in ("weights", "advantages"):
            np.testing.assert_array_equal(batch[name][row] != 0, is_own[1:])
        assert not batch["policy_weights"][row][~is_own[1:]].any()
        text = seen["texts"][row]
        assert text == "".join(LETTERS[i] for i in ids if i != END)
    assert num_replies > 4
    metrics = {"step": 1}
    data.told.after_step(metrics)
    assert metrics["tools/call_frequency"] == num_replies / 8
    own = (batch["labels"] != -100).sum(1)
    assert metrics["completions/mean_length"] == own.mean()
    # The same again: replies too are those of the seed.
    np.testing.assert_array_equal(
        batch["input_ids"],
        next(iter(talks(settings=changes).of(Drawing())))["input_ids"],
    )


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"most": 1}, 2, 2),
        # An end, a reply of two tokens, and no room for a token behind it.
        ({"settings": {"max_completion_length": 3}}, 1, 1),
        ({}, 3, 6),
    ],
)
def test_turns_end_by_their_number_and_by_tokens(settings, least, most):
    turns = []

    def count(completions, **_):
        return [" a"] * len(completions)

    def keep(completion_ids, **_):
        # Each reply is two letters, the first of them a space.
        turns.extend(1 + ids.count(LETTERS.index(" ")) for ids in completion_ids)
        return [float(n) for n in range(8)]

    data = talks(count, rewards=keep, **settings)
    next(iter(data.of(Drawing())))
    metrics = {"step": 1}
    data.told.after_step(metrics)
    assert least <= max(turns) <= most
    assert metrics["environment/stopped_ratio"] > 0


def conversation(count=4):
    said = [{"role": "user", "content": "hi"}]
    return [Prompt(np.array([3, 4], np.int32), said, {}, "line 1")] * count


def test_a_conversation_gets_messages():
    seen = []

    def reply(completions, turns, **_):
        seen.append([*completions])
        first = {"role": "tool", "name": "add", "content": "2"}
        return [first if turn == 1 else None for turn in turns]

    def tokens(messages):
        assert messages == [{"role": "tool", "name": "add", "content": "2"}]
        return [5, 6]

    data = rollouts(
        Grpo(**FEW),
        given=conversation(),
        length=33,
        environment=Environment(reply, tokens),
        rewards=lambda completions, **_: [float(len(c)) for c in completions],
    )
    next(iter(data.of(Drawing())))
    roles = {tuple(m["role"] for m in c) for turn in seen for c in turn}
    assert roles == {("assistant",), ("assistant", "tool", "assistant")}


def raising(completions, number, **_):
    if number != [number[0]] * len(number):
        raise ZeroDivisionError("several")
    if number[0] % 2:
        raise ZeroDivisionError("odd")
    return [None] * len(completions)


def hanging(completions, number, **_):
    if any(n == 1 for n in number) or len(number) > 1:
        time.sleep(30)
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raising, "it raised ZeroDivisionError: odd"),
        (hanging, r"it took more than 0.3 seconds \(grpo.environment_timeout\)"),
    ],
)
def test_what_an_environment_fails_for_is_left_out_by_name(function, reason, caplog):
    settings = Grpo(**FEW | {"num_generations": 2, "shuffle_dataset": False})
    found = environment(function, timeout=0.3)
    data = rollouts(settings, environment=found, length=33, batch_size=4)
    with caplog.at_level(logging.WARNING):
        batch = next(iter(data.of(Drawing())))
    (text,) = caplog.messages
    assert f"The environment {function.__name__}: " in text and "prompt 1'" in text
    assert re.search(reason, text)
    is_kept = (batch["weights"] != 0).any(1)
    # Nothing is asked for the second prompt's where the turn did not end.
    assert is_kept[:2].all() and not is_kept[2:].all()


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda completions: [None], WrongAnswers, "returned 1 replies for . comp"),
        (lambda completions: None, WrongAnswers, "returned a NoneType.*prompt"),
        (lambda completions: [3] * len(completions), WrongAnswers, "replied 3 to"),
        (lambda completions: [""] * len(completions), WrongAnswers, "replied '' to"),
        (
            lambda completions: [{"role": "user"}] * len(completions),
            WrongAnswers,
            "a text that is not empty",
        ),
        (lambda board: [None], ValueError, "takes 'board', and record 0 has no such"),
        (lambda turns, /: [None], ValueError, "stands before a /"),
    ],
)
def test_replies_that_no_run_can_go_on_with_are_refused(function, error, text):
    with pytest.raises(error, match=text):
        next(iter(talks(function).of(Drawing())))


def test_an_environment_needs_turns_that_end():
    with pytest.raises(ValueError, match="no token ends one"):
        talks(eos_token_ids=())


def replying(completions, turns, seeds, **_):
    return [
        None if turn > 2 else "ab"[seed % 2] * (1 + seed % 3)
        for turn, seed in zip(turns, seeds, strict=True)
    ]


@pytest.mark.slow
def test_conversations_are_equal_wherever_arrays_rest(tmp_path):
    """And both programs score the tokens of later turns alike."""
    settings = Grpo(num_generations=8, max_completion_length=12, temperature=0.7)

    def run(tier):
        return train(
            settings,
            2,
            config=config_on(tier, tmp_path),
            environment=environment(replying),
            # Several tokens end a turn, so that there are several.
            eos_token_ids=tuple(range(0, 28, 4)),
        )

    runs = {tier: run(tier) for tier in ("device", "host", "nvme")}
    assert numbers(runs["device"]) == numbers(runs["host"]) == numbers(runs["nvme"])
    first = runs["device"][0]
    assert first["tools/call_frequency"] > 1 and first[DIFFERENCE] < 2e-5
