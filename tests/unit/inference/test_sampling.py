"""How the next token is chosen from logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.refusals import refusals
from zinf.core.jaxpr.keys import to_words
from zinf.inference.sampling import NEUTRAL, Sampling, read_settings

KIND = jax.random.key(0)
# Probabilities 0.5, 0.25, 0.15 and 0.1.
LOGITS = np.log(np.array([0.15, 0.5, 0.1, 0.25], np.float32))


def drawn(sampling, logits=LOGITS, count=200, number=0, seen=None):
    """How often each token is drawn."""
    words = to_words(jax.random.split(jax.random.key(1), count))
    many = jnp.tile(jnp.asarray(logits), (count, 1))
    seen = None if seen is None else jnp.tile(jnp.asarray(seen), (count, 1))
    numbers = sampling.constants(), jnp.full(count, number)
    tokens = jax.jit(lambda x: sampling.choose(x, *numbers, words, KIND, seen))(many)
    return np.bincount(np.asarray(tokens), minlength=len(logits))


def possible(sampling, **rest):
    return set(np.flatnonzero(drawn(sampling, **rest)))


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {1}),
        ({"temperature": 0.01}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        # 0.5 + 0.25 is the first sum that reaches 0.7.
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.01}, {1}),
        # Only 0.5 and 0.25 are at least 0.4 of 0.5.
        ({"min_p": 0.4}, {1, 3}),
        # Probabilities after top_k are 0.56, 0.28 and 0.17.
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.4}, {1, 3}),
    ],
)
def test_only_these_tokens_are_drawn(options, tokens):
    assert possible(Sampling(**options)) == tokens


def test_tokens_are_drawn_with_their_probabilities():
    count = 4000
    shares = drawn(Sampling(), count=count) / count
    # Six standard deviations of a share of 4,000 draws are at most 6 * 0.0079.
    np.testing.assert_allclose(shares, np.exp(LOGITS), atol=0.048)


def test_a_penalty_makes_what_was_said_less_likely():
    seen = np.array([False, True, False, False])
    greedy = Sampling(temperature=0.0, repetition_penalty=10.0)
    # log 0.5 is negative, so it is multiplied by 10.
    assert possible(greedy, seen=seen) == {3}
    assert possible(greedy, logits=LOGITS + 2, seen=seen) == {3}


def test_no_sequence_ends_before_the_least_number_of_tokens():
    greedy = Sampling(temperature=0.0, eos_token_ids=(1,), min_new_tokens=3)
    assert possible(greedy, number=2) == {3}
    assert possible(greedy, number=3) == {1}


def test_settings_of_transformers_are_read():
    for name, neutral in NEUTRAL.items():
        with pytest.raises(NotImplementedError, match=f"setting {name} = 7"):
            read_settings({name: 7})
        for value in (None, [], *neutral):
            read_settings({name: value})
    assert read_settings({"top_k": 50, "eos_token_id": 3}) == Sampling(
        temperature=0.0, eos_token_ids=(3,)
    )
    found = read_settings({"do_sample": True, "top_k": 50, "eos_token_id": [3, 4]})
    assert found == Sampling(top_k=50, eos_token_ids=(3, 4))


def test_numbers_out_of_their_range_are_refused(golden):
    for valid in ({"temperature": 0}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}):
        Sampling(**valid)
    wrong = {
        "temperature": (-0.1,),
        "top_k": (-1,),
        "top_p": (0, 1.1),
        "min_p": (-0.1, 1.1),
        "repetition_penalty": (0,),
        "min_new_tokens": (-1,),
    }
    cases = {
        f"{name} = {value}": partial(Sampling, **{name: value})
        for name, values in wrong.items()
        for value in values
    }
    golden.check("sampling_refusals.txt", refusals(cases))


@pytest.mark.slow
def test_processors_of_transformers_leave_the_same_tokens():
    import torch
    import transformers

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 50)).astype(np.float32) * 3
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(20),
            transformers.TopPLogitsWarper(0.8),
            transformers.MinPLogitsWarper(0.1),
        ]
    )
    wanted = processors(torch.zeros((4, 1), dtype=torch.long), torch.tensor(logits))
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1)
    scaled = jnp.asarray(logits) / np.float32(0.7)
    found = sampling._filtered(scaled, sampling.constants())
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
