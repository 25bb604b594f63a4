"""Batches by tokens: each sample once an epoch, the same however a run is cut."""

import itertools
import json

import grain
import numpy as np
import pytest

from zinf.data import Bucket, TokenBatches, make_buckets, rate_scale
from zinf.trainer import _Batches

LONGEST, MAX_TOKENS = 24, 48
LENGTHS = np.random.default_rng(0).integers(1, LONGEST + 1, 61)


class Rows(grain.sources.RandomAccessDataSource):
    """Sample i is `lengths[i]` times the number i, padded with -1."""

    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        row = np.full(LONGEST, -1, np.int32)
        row[: self.lengths[index]] = index
        return {"input_ids": row, "labels": row}


def batches(process=(0, 1), *, num_microbatches=1, **named) -> TokenBatches:
    sizes = {"max_tokens": MAX_TOKENS, "max_buckets": 4, "min_batch_size": 2}
    buckets = make_buckets(LENGTHS, **sizes)
    shared = {"process": process, "num_microbatches": num_microbatches}
    return TokenBatches(Rows(), LENGTHS, buckets, **shared, **named)


def test_lengths_of_buckets_pad_as_little_as_any_others():
    """Compared with all choices."""
    draw = np.random.default_rng(1)
    for count in (1, 2, 3, 9):
        lengths = draw.integers(1, 10, 20)
        found = make_buckets(lengths, max_tokens=99, max_buckets=count)
        ends = [bucket.length for bucket in found]

        def padded(ends, lengths=lengths):
            return sum(min(end for end in ends if end >= n) for n in lengths)

        levels = sorted({*lengths.tolist()})
        choices = [
            {*some, levels[-1]}
            for size in range(count)
            for some in itertools.combinations(levels, size)
        ]
        assert len(ends) <= count
        assert padded(ends) == min(map(padded, choices))


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


def test_buckets_of_many_batches_are_those_of_each():
    order = batches().order
    expected = [order.bucket(number) for number in range(70)]
    assert order.buckets(70).tolist() == expected
    assert [order._epoch_of(number) for number in (0, 69)] == [0, 3]


def test_a_run_resumes_anywhere_on_any_number_of_processes():
    parts, steps = 2, 20

    def together(count, start=None, number=steps):
        readers = [
            iter(batches((i, count), num_microbatches=parts)) for i in range(count)
        ]
        if start is not None:
            for reader in readers:
                reader.set_state(start)
        found = []
        for _ in range(number):
            shares = [next(reader)["input_ids"] for reader in readers]
            cut = [np.split(share, parts) for share in shares]
            found.append(np.concatenate([c[m] for m in range(parts) for c in cut]))
        return found, [reader.get_state() for reader in readers]

    undisturbed, _ = together(1)
    for stop in (0, 7, 13):
        first, states = together(2, number=stop)
        assert states[0] == states[1]
        state = json.loads(json.dumps(states[0]))
        rest, _ = together(1, state, steps - stop)
        for batch, expected in zip(first + rest, undisturbed, strict=True):
            assert (batch == expected).all()


def test_the_trainer_knows_the_shapes_that_come():
    found = _Batches(batches(num_microbatches=2))
    first = found.peek()["input_ids"].shape
    largest = found.largest()["input_ids"].shape
    coming = [batch["input_ids"].shape for batch in found.coming(100)]
    seen = [next(found)["input_ids"].shape for _ in range(60)]
    assert seen[0] == first and {*coming} | {first} == {*seen}
    assert largest[0] * largest[1] == max(rows * length for rows, length in seen)
    assert list(dict.fromkeys(seen[1:]))[: len(coming)] == coming


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
        TokenBatches(Rows(), LENGTHS, [Bucket(LONGEST, 1)], process=(0, 2))
