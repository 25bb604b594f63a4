"""Drafts change how often weights are read, and no token of a text."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.inference.generating import (
    DRAWN,
    KEYS,
    PROMPTS,
    RNG,
    counting_after_prompts,
    counting_compilations,
    counting_sweeps,
    make_engine,
    on_nvme,
    programs,
    used_bytes,
)
from tests.unit.refusals import refusals
from zinf.core.program import Tier
from zinf.inference import Decoder, Drafts, Scores, plan, prompt_lookup

WIDTH = 4  # Guesses of a pass.
LOOKED_UP = [
    np.array(text)
    for text in ([1, 2, 3, 4, 1, 2], [5, 1, 9, 8, 1], [1, 2, 3], [7], [4, 4, 4])
]


@pytest.fixture(scope="module")
def streaming():
    with make_engine({"execution": "streamed"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def fused():
    with make_engine() as engine:
        yield engine


def drafts_of(prompts, texts, is_right=lambda number, place: True, *, longer=0):
    """Guesses of the known texts, wrong at some of their places."""

    def guess(numbers, known):
        found = []
        for number, tokens in zip(numbers, known, strict=True):
            first = len(tokens) - len(prompts[number])
            rest = list(enumerate(texts[number]))[first : first + WIDTH]
            right = [x if is_right(number, i) else (x + 1) % 97 for i, x in rest]
            found.append(right + longer * [0])
        return found

    return Drafts(WIDTH, guess)


def num_sweeps(is_right, count):
    """Passes for `count` tokens of one sequence, the first of which a prefill makes."""
    place, sweeps = 1, 0
    while place < count:
        last = min(place + WIDTH, count)
        wrong = (i for i in range(place, last) if not is_right(0, i))
        place, sweeps = next(wrong, last) + 1, sweeps + 1
    return sweeps


@pytest.mark.parametrize(
    ("name", "count", "how"),
    [
        ("streaming", 1, {}),
        ("streaming", 8, {}),
        ("streaming", 8, DRAWN),
        ("fused", 8, DRAWN),
    ],
)
def test_drafts_change_no_token(name, count, how, request):
    engine = request.getfixturevalue(name)
    prompts, rest = (2 * PROMPTS)[:count], {"max_new_tokens": 14, **how}
    rest |= {"key": KEYS[np.arange(count) % 4], "scores": Scores(2)}
    with counting_after_prompts() as num_passes:
        wanted = engine.generate(prompts, **rest)
        most = num_passes()
    texts = [text.tokens for text in wanted]
    assert most == max(map(len, texts)) - 1
    fewest = -(-most // (WIDTH + 1))
    for drafts, passes in (
        (drafts_of(prompts, texts, lambda number, place: False), most),
        (drafts_of(prompts, texts), fewest),
        (drafts_of(prompts, texts, longer=40), fewest),
        (drafts_of(prompts, texts, lambda number, place: place % 3), None),
        (Drafts(WIDTH, lambda numbers, known: [[]] * len(known)), None),
        (prompt_lookup(WIDTH), None),
    ):
        before = used_bytes(engine)
        with counting_after_prompts() as num_passes:
            got = engine.generate(prompts, drafts=drafts, **rest)
        assert [text.tokens for text in got] == texts
        for one, other in zip(got, wanted, strict=True):
            for each in ("log_probabilities", "entropies", "top_log_probabilities"):
                values = getattr(one, each), getattr(other, each)
                np.testing.assert_allclose(*values, atol=4e-6)
        assert num_passes() <= most
        assert passes is None or num_passes() == passes
        assert used_bytes(engine) == before
    if name == "fused":
        assert "everything fits" in programs(engine).why


@pytest.mark.parametrize("name", ["streaming", "fused"])
def test_weights_are_read_once_for_the_guesses_that_are_right(name, request):
    """And nothing is compiled for other drafts of as many tokens."""
    engine = request.getfixturevalue(name)
    prompts, rest = PROMPTS[:1], {"max_new_tokens": 40}
    texts = engine.generate(prompts, **rest)
    engine.generate(prompts, drafts=drafts_of(prompts, texts), **rest)
    flags = RNG.random(40) < 0.7
    is_right = lambda number, place: flags[place]  # noqa: E731
    drafts = drafts_of(prompts, texts, is_right)
    with counting_sweeps() as found, counting_compilations() as compiled:
        with counting_after_prompts() as num_passes:
            assert engine.generate(prompts, drafts=drafts, **rest) == texts
    assert not compiled
    sweeps = num_sweeps(is_right, 40)
    assert num_passes() == sweeps
    if name == "streaming":
        assert found == [[(8, 16)], *sweeps * [[(8, WIDTH + 1)]]]


@pytest.mark.parametrize("name", ["streaming", "fused"])
def test_a_text_may_end_where_the_model_does_and_guesses_beyond(name, request):
    """64 tokens are the most of the model; the cache has slots for the guesses."""
    engine = request.getfixturevalue(name)
    prompts, rest = [RNG.integers(0, 97, 40), [1]], {"max_new_tokens": 24}
    texts = engine.generate(prompts, **rest)
    for longer in (0, WIDTH):
        drafts = drafts_of(prompts, texts, longer=longer)
        assert engine.generate(prompts, drafts=drafts, **rest) == texts


def test_a_text_that_repeats_itself_is_looked_up(streaming):
    guess = prompt_lookup(3, max_matching_ngram_size=2).guess
    assert [list(x) for x in guess(range(5), LOOKED_UP)] == [
        *([3, 4, 1], [9, 8, 1], [], [], [4])
    ]
    # The model, of random weights, soon says the same again and again.
    with counting_sweeps() as sweeps:
        streaming.generate([[3]], max_new_tokens=48, drafts=prompt_lookup(WIDTH))
    assert len(sweeps) < 48 / 2


def test_a_device_looks_up_what_the_host_does():
    """Also in texts of few words, and whatever stands before and after a text."""
    texts = [np.array([7, 3, 7]), *LOOKED_UP]  # The first is seen at place 0 alone.
    texts += [RNG.integers(0, 3, n) for n in RNG.integers(1, 40, 60)]
    starts = RNG.integers(0, 6, len(texts))
    starts[0] = 0
    padded = RNG.integers(0, 3, (len(texts), 50))
    for row, text in enumerate(texts):
        padded[row, starts[row] : starts[row] + len(text)] = text
    ends = starts + [len(text) for text in texts]
    for size in (1, 2, 3):
        drafts = prompt_lookup(WIDTH, max_matching_ngram_size=size)
        found = drafts.on_device(jnp.asarray(padded), starts, ends)
        wanted = drafts.guesses(range(len(texts)), texts, 10)
        np.testing.assert_array_equal(found, wanted)


def test_a_small_model_may_guess(streaming):
    """Another engine, with budgets of its own; this one has the same weights."""
    prompts, rest = PROMPTS[:2], {"max_new_tokens": 16, "rows": 2}
    wanted = streaming.generate(prompts, **rest)
    with make_engine() as small:
        ask = {"max_new_tokens": WIDTH, "rows": 2}
        drafts = Drafts(WIDTH, lambda numbers, texts: small.generate(texts, **ask))
        with counting_sweeps() as found:
            assert streaming.generate(prompts, drafts=drafts, **rest) == wanted
    assert len(found) == 1 + 15 // (WIDTH + 1)


@pytest.mark.slow
@pytest.mark.parametrize("tier", Tier)
def test_drafts_change_no_token_wherever_the_cache_rests(tier, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.GenerationPlanner, "tiers", (tier,))
    with make_engine(on_nvme(tmp_path), position="rope") as engine:
        rest = {"max_new_tokens": 12, "key": KEYS, **DRAWN}
        texts = engine.generate(PROMPTS, **rest)
        is_right = lambda number, place: (number + place) % 4  # noqa: E731
        drafts = drafts_of(PROMPTS, texts, is_right)
        assert engine.generate(PROMPTS, drafts=drafts, **rest) == texts
        assert set(programs(engine).decode.cache_tiers.values()) == {tier}


def test_bad_drafts_are_refused_by_name(streaming, golden):
    def generate(guess, **rest):
        drafts = Drafts(WIDTH, guess)
        return lambda: streaming.generate(
            [[1]], drafts=drafts, max_new_tokens=9, **rest
        )

    def without(name):
        own = streaming._decoder(None)
        made = {"apply_all": own.apply_all, "take_back": own.take_back, name: None}
        return Decoder(own.apply, own.init_cache, **made)

    right = lambda numbers, texts: [[1]] * len(texts)  # noqa: E731
    cases = {
        "no guess": lambda: Drafts(0, right),
        "no n-gram": lambda: prompt_lookup(4, max_matching_ngram_size=0),
        "another vocabulary": generate(lambda numbers, texts: [[5, 97, 98]]),
        "a negative token": generate(lambda numbers, texts: [[-1]]),
        "drafts of other texts": generate(lambda numbers, texts: [[1], [2]]),
        "a state that forgets nothing": generate(right, decoder=without("take_back")),
        "logits of the last alone": generate(right, decoder=without("apply_all")),
    }
    golden.check("drafts_refusals.txt", refusals(cases))
