"""Batches by tokens: each sample once an epoch, and as little padding as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_resume import Lengths
from zinf.data import Bucket, TokenBatches, make_buckets, rate_scale

MAX_TOKENS = 48
LENGTHS = Lengths.lengths


def batches(*, num_microbatches=1, **named) -> TokenBatches:
    sizes = {"max_tokens": MAX_TOKENS, "max_buckets": 4, "min_batch_size": 2}
    buckets = make_buckets(LENGTHS, **sizes)
    named["num_microbatches"] = num_microbatches
    return TokenBatches(Lengths(), LENGTHS, buckets, **named)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    count=st.integers(1, 9),
)
def test_lengths_of_buckets_pad_as_little_as_any_others(lengths, count):
    """Compared with all choices."""
    found = make_buckets(lengths, max_tokens=99, max_buckets=count)
    ends = [bucket.length for bucket in found]

    def padded(ends):
        return sum(min(end for end in ends if end >= n) for n in lengths)

    levels = sorted({*lengths})
    choices = [
        {*some, levels[-1]}
        for size in range(count)
        for some in itertools.combinations(levels, size)
    ]
    assert len(ends) <= count and ends == sorted({*ends})
    assert padded(ends) == min(map(padded, choices))
    assert [bucket.rows for bucket in found] == [99 // end for end in ends]


def test_lengths_of_buckets_are_multiples_of_a_64th_of_the_longest():
    lengths = np.arange(1, 131)
    found = make_buckets(lengths, max_tokens=130, max_buckets=99)
    # 130 / 64 is rounded up to 3.
    assert [bucket.length for bucket in found] == [*range(3, 130, 3), 130]


def test_a_batch_has_at_most_max_tokens_and_the_rows_that_have_room():
    data = batches(num_microbatches=3)
    seen = set()
    for number in range(40):
        tokens = data.read(number)["input_ids"]
        rows, length = tokens.shape[0] // 3, tokens.shape[1]
        assert tokens.shape[0] % 3 == 0 and rows * length <= MAX_TOKENS
        assert (rows + 2) * length > MAX_TOKENS
        # No token is cut off.
        assert ((tokens >= 0).sum(axis=1) == LENGTHS[tokens[:, 0]]).all()
        seen.add(tokens.shape)
    assert len(seen) == 4


@pytest.mark.parametrize("order", ["random", "seqlen"])
def test_each_sample_is_used_once_an_epoch(order):
    data = batches(order=order)
    epochs = 5
    used = np.zeros(len(LENGTHS), int)
    for number in range(data.order.num_batches(epochs)):
        np.add.at(used, data.order.samples(number), 1)
    # All but those that wait for their batch to be complete.
    rows = np.array([bucket.rows for bucket in data.buckets])
    waiting = epochs * len(LENGTHS) - used.sum()
    assert 0 <= waiting <= (rows - 1).sum()
    assert used.max() <= epochs and used.min() >= epochs - 1


def test_epochs_differ_and_seeds_do_and_equal_seeds_do_not():
    first, again, other = batches(seed=1), batches(seed=1), batches(seed=2)
    count = first.order.num_batches(1)

    def drawn(data, start):
        numbers = range(start, start + count)
        return [data.order.samples(number).tolist() for number in numbers]

    assert drawn(first, 0) == drawn(again, 0)
    assert drawn(first, 0) != drawn(first, count)
    assert drawn(first, 0) != drawn(other, 0)


def test_the_shortest_samples_come_first_if_so_asked():
    data = batches(order="seqlen")
    count = data.order.num_batches(1)
    lengths = [LENGTHS[data.order.samples(number)].max() for number in range(count)]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("count", [1, 2, 70])
def test_buckets_of_many_batches_are_those_of_each(count):
    order = batches().order
    expected = [order.bucket(number) for number in range(count)]
    assert order.buckets(count).tolist() == expected


@pytest.mark.parametrize(
    ("method", "expected"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)]
)
def test_the_rate_grows_with_the_rows_of_a_batch(method, expected):
    assert rate_scale(32, 8, method) == expected


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        ([], {}, "no samples"),
        ([5, 0], {}, "one has no token"),
        ([5, 49], {}, r"49 tokens, of which max_tokens 48 has room for 0 rows"),
        ([20], {"min_batch_size": 3}, "room for 2 rows, but min_batch_size asks for 3"),
        (
            [4],
            {"min_batch_size": 3, "max_batch_size": 2},
            "for 12 rows and at most 2, but min_batch_size asks for 3",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused(lengths, changed, message):
    with pytest.raises(ValueError, match=message):
        make_buckets(lengths, **{"max_tokens": 48, "max_buckets": 4} | changed)


def test_rows_that_do_not_divide_among_processes_are_refused():
    with pytest.raises(ValueError, match="does not divide among 2 processes"):
        TokenBatches(Lengths(), LENGTHS, [Bucket(24, 1)], process=(0, 2))
