"""Shapes of prompts, and which batch of sequences is large enough."""

from types import SimpleNamespace

import numpy as np
import pytest

from zinf.inference import saturating
from zinf.inference.prompts import Part, Request, by_part, shape_of
from zinf.inference.rows import Shape


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "prompt", "slots"),
    [
        # A prompt has a power of two of slots; slots come in sixteens.
        (1, 1, 16, 16),
        (16, 1, 16, 16),
        (17, 1, 32, 32),
        (33, 1, 64, 64),
        # The last new token is never read, so it has no slot.
        (16, 2, 16, 32),
        (16, 17, 16, 32),
        (16, 18, 16, 48),
    ],
)
def test_a_shape_depends_on_the_sequence_alone(length, max_new_tokens, prompt, slots):
    assert shape_of(8, length, max_new_tokens) == Shape(8, prompt, slots)


@pytest.mark.parametrize(
    ("length", "num_written", "first", "end"),
    [
        # The token that makes a sequence longer than 20 ends its part.
        (18, 0, 0, 3),
        (20, 0, 0, 1),
        # Read anew, or longer from the beginning: nothing ends it.
        (21, 3, 3, 10),
        (30, 0, 0, 10),
        # It does not get so long.
        (5, 0, 0, 10),
    ],
)
def test_a_part_ends_where_a_sequence_is_read_anew(length, num_written, first, end):
    request = Request(0, np.zeros(length, np.int32), np.zeros(2), num_written)
    shape = shape_of(8, length, 10 - num_written)
    assert by_part([request], 8, 10, 20) == {Part(shape, first, end): [request]}


@pytest.mark.parametrize(
    ("rates", "enough"),
    [
        # The gain of the next size is a tenth at most.
        ([10, 20, 22], 20),
        ([10, 20, 22.1], None),
        ([10, 10, 20, 21], 20),
        ([10], None),
    ],
)
def test_a_batch_is_large_enough_if_no_larger_one_gains_a_tenth(rates, enough):
    found = saturating([SimpleNamespace(tokens_per_second=rate) for rate in rates])
    assert found == (enough and SimpleNamespace(tokens_per_second=enough))
