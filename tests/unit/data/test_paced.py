"""Sequences get longer as the schedule says, and a run resumes at any step."""

import json

import grain
import numpy as np
import pytest

from zinf.cli.problem import dataset
from zinf.config import Config
from zinf.config.pace import counted_steps
from zinf.config.pacing import Pacing
from zinf.data import Dropping, Pace, Paced, Share, describe
from zinf.prepare.batch import check_rows

WINDOW, ROWS = 17, 8  # a row predicts 16 tokens


def pace(*, tokens: bool = False, max_buckets: int = 8) -> Pace:
    total = {"total_curriculum_tokens" if tokens else "total_curriculum_step": 12}
    if tokens:
        total = {"total_curriculum_tokens": 12 * ROWS * 8}
    config = {
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"difficulty_step": 4, **total},
    }
    return Pace.of(Pacing.model_validate(config), max_buckets)


def samples(num: int = 200) -> grain.MapDataset:
    rows = np.arange(num * WINDOW, dtype=np.int32).reshape(num, WINDOW)
    data = grain.MapDataset.source([{"tokens": r, "id": r[0]} for r in rows])
    return data.shuffle(5).repeat(None)


def paced(length: Pace, process=(0, 1), *, reshapes=False, num_microbatches=1) -> Paced:
    share = Share(samples(), ROWS, process=process, num_microbatches=num_microbatches)
    return Paced(share, length=length, reshapes=reshapes)


def take(iterator, count: int) -> list[np.ndarray]:
    return [next(iterator)["tokens"] for _ in range(count)]


def test_rows_are_truncated_to_the_length_of_the_step():
    whole = iter(Share(samples(), ROWS))
    length = pace()
    for step, batch in zip(range(20), paced(length), strict=False):
        expected = length.at(step, tokens=0)
        assert batch["tokens"].shape == (ROWS, expected + 1)
        row = next(whole)
        assert (batch["tokens"] == row["tokens"][:, : expected + 1]).all()
        assert (batch["id"] == row["id"]).all()
    assert expected == 16


def test_rows_are_cut_into_pieces_that_predict_each_token_once():
    whole = iter(Share(samples(), ROWS))
    for batch in [next(i) for i in [iter(paced(pace(), reshapes=True))] for _ in "ab"]:
        row = next(whole)
        assert batch["tokens"].shape == (ROWS * 4, 5)
        targets = batch["tokens"][:, 1:].reshape(ROWS, 16)
        assert (targets == row["tokens"][:, 1:]).all()
        assert (batch["id"] == np.repeat(row["id"], 4)).all()


@pytest.mark.parametrize("reshapes", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_run_resumes_at_any_step_on_any_number_of_processes(tokens, reshapes):
    """The microbatches of all processes together are those of one."""
    length = pace(tokens=tokens)
    steps, parts = 16, 2

    def together(count: int, position: int, number: int, state=None) -> list:
        readers = []
        for index in range(count):
            made = paced(
                length, (index, count), reshapes=reshapes, num_microbatches=parts
            )
            readers.append(iter(made))
            if state is not None:
                readers[-1].set_state(state)
        found = []
        for _ in range(number):
            shares = [next(reader)["tokens"] for reader in readers]
            cut = [np.split(share, parts) for share in shares]
            found.append(np.concatenate([c[m] for m in range(parts) for c in cut]))
        return [found, [reader.get_state() for reader in readers]]

    undisturbed, _ = together(1, 0, steps)
    assert len({batch.shape for batch in undisturbed}) == 4
    for stop in range(0, steps, 5):
        for before, after in ((1, 2), (2, 4), (4, 1)):
            first, states = together(before, 0, stop)
            assert all(state == states[0] for state in states)
            state = json.loads(json.dumps(states[0]))
            rest, _ = together(after, stop, steps - stop, state)
            for batch, expected in zip(first + rest, undisturbed, strict=True):
                assert (batch == expected).all()


def test_tokens_before_a_step_decide_where_the_schedule_counts_them():
    length, seen = pace(tokens=True), 0
    iterator = iter(paced(length))
    for step in range(30):
        tokens = next(iterator)["tokens"]
        assert tokens.shape[1] - 1 == length.at(step, seen)
        seen += tokens.shape[0] * (tokens.shape[1] - 1)
    assert iterator.get_state()["tokens"] == seen


@pytest.mark.parametrize("reshapes", [False, True])
def test_the_shapes_that_come_are_known_ahead(reshapes):
    iterator = iter(paced(pace(tokens=True), reshapes=reshapes))
    first = next(iterator)["tokens"].shape
    coming = [batch["tokens"].shape for batch in iterator.coming(100)]
    assert iterator.whole()["tokens"].shape == (ROWS, WINDOW)
    seen = list(dict.fromkeys([first, *[b.shape for b in take(iterator, 40)]]))
    assert [first, *[shape for shape in coming if shape != first]] == seen
    assert [b["tokens"].shape for b in iterator.coming(100)] == [(ROWS, WINDOW)]
    assert len(coming) == 4 and iterator.coming(0) == []


def test_a_run_that_ends_before_makes_no_plan_that_it_does_not_use():
    iterator = iter(paced(pace()))
    next(iterator)
    seen = {batch["tokens"].shape for batch in iterator.coming(5)}
    assert seen == {batch.shape for batch in take(iterator, 5)}


def test_few_buckets_stand_for_many_lengths():
    length = pace(max_buckets=2)
    assert length.buckets == (4, 16)
    found = [batch.shape[1] - 1 for batch in take(iter(paced(length)), 20)]
    assert {*found} == {4, 16} and found == sorted(found)


def test_describe_counts_the_tokens_that_are_predicted():
    batch = {"tokens": np.zeros((3, 9), np.int32)}
    assert describe(batch) == {
        "sequence_length": 8,
        "kept_tokens": 8,
        "tokens": 24,
    }


def dropping(num_layers: int = 3) -> Dropping:
    config = {
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 4},
    }
    kept = Pace.of(Pacing.model_validate(config), 8, first=0)
    return Dropping(kept, num_layers, seed=7)


def dropped(process=(0, 1), length: Pace | None = None, **named) -> Paced:
    parts = named.pop("num_microbatches", 1)
    share = Share(samples(), ROWS, process=process, num_microbatches=parts)
    return Paced(share, length=length, dropping=dropping(), **named)


def test_kept_positions_are_ascending_and_as_many_as_the_schedule_says():
    for step, batch in zip(range(12), dropped(), strict=False):
        count = dropping().kept.at(step, 0)
        assert count == min(4 + 12 * step // 9 // 4 * 4, 16)
        assert describe(batch)["kept_tokens"] == count
        if count == 16:
            assert "kept" not in batch
            continue
        kept = batch["kept"]
        assert kept.shape == (ROWS, 3, count) and kept.dtype == np.int32
        assert (np.diff(kept, axis=2) > 0).all() and kept.max() < 16
        # Each row and each layer has its own.
        assert len(np.unique(kept.reshape(-1, count), axis=0)) > ROWS * 3 // 2


def test_sequences_that_are_no_longer_than_what_is_kept_drop_nothing():
    """Both schedules together: lengths 4, 8, 12, 16 and as many kept tokens."""
    seen = [
        (describe(batch)["sequence_length"], describe(batch)["kept_tokens"])
        for batch, _ in zip(dropped(length=pace()), range(14), strict=False)
    ]
    assert seen[0] == (4, 4) and seen[-1] == (16, 16)
    assert all(kept <= length for length, kept in seen)
    iterator = iter(dropped(length=pace()))
    next(iterator)
    coming = [
        (describe(batch)["sequence_length"], describe(batch)["kept_tokens"])
        for batch in ({k: np.empty(v.shape) for k, v in b.items()}
        for b in iterator.coming(50))
    ]  # fmt: skip
    assert coming == list(dict.fromkeys(seen[1:]))


@pytest.mark.parametrize("reshapes", [False, True])
def test_kept_tokens_are_the_same_on_any_number_of_processes_and_after_a_resume(
    reshapes,
):
    named = {"length": pace(), "reshapes": reshapes, "num_microbatches": 2}
    one = [next(it) for it in [iter(dropped(**named))] for _ in range(6)]
    readers = [iter(dropped((index, 2), **named)) for index in range(2)]
    for expected in one[:3]:
        for batch in [next(reader) for reader in readers]:
            assert ("kept" in batch) == ("kept" in expected)
    again = iter(dropped(**named))
    again.set_state(json.loads(json.dumps(readers[1].get_state())))
    for expected in one[3:]:
        batch = next(again)
        assert batch.keys() == expected.keys()
        assert all((batch[key] == expected[key]).all() for key in batch)
        shares = [next(reader) for reader in readers]
        for key in batch:
            cut = [np.split(share[key], 2) for share in shares]
            whole = np.concatenate([c[m] for m in range(2) for c in cut])
            assert (whole == expected[key]).all()


def test_more_kept_tokens_than_a_sequence_has_are_refused():
    other = Other({"tokens": np.zeros((8, 9), np.int32)})
    with pytest.raises(ValueError, match="to keep 16 tokens.* which predicts 8"):
        next(iter(Paced(other, dropping=dropping())))


class Other(grain.IterDataset):
    """Batches of a shape."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def __iter__(self):
        return grain.MapDataset.source([self.batch]).to_iter_dataset().__iter__()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": np.zeros(8, np.int32)}, r"must have the shape \(rows, tokens\)"),
        ({"x": np.zeros((8, 17))}, "must have the shape .* no such leaf"),
        (
            {"tokens": np.zeros((8, 9), np.int32)},
            r"to predict 16 tokens.* \[8, 9\], which predicts 8",
        ),
    ],
)
def test_batches_that_cannot_be_shortened_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        next(iter(Paced(Other(batch), length=pace())))


@pytest.mark.parametrize("wrong", [(), (8, 4), (4, 4), (0, 8)])
def test_buckets_that_are_no_lengths_are_refused(wrong):
    with pytest.raises(ValueError, match="bucket"):
        Pace(lambda count: count, wrong)


def test_counted_steps_are_the_tokens_before_each_step_in_whole_steps():
    for reshapes in (False, True):
        length = pace(tokens=True)
        steps, counted = counted_steps(
            24, longest=16, length=length, reshapes=reshapes, rows=ROWS
        )
        iterator = iter(paced(length, reshapes=reshapes))
        for step in range(25):
            found = float(np.interp(step, steps, counted))
            tokens = iterator.get_state()["tokens"]
            assert abs(found * 16 * ROWS - tokens) < 1e-6 * max(tokens, 1)
            next(iterator)
        # Of pieces of 4, 8 and 16 tokens no token is left out; of 12, 4 of 16 are.
        assert len(steps) == len(counted) <= 5


def test_dropped_tokens_count_less_where_layers_are_counted():
    kept = dropping().kept
    steps, counted = counted_steps(12, longest=16, kept=kept, share=0.5)
    for step in range(12):
        before = sum(0.5 + 0.5 * kept.at(i, 0) / 16 for i in range(step))
        assert abs(float(np.interp(step, steps, counted)) - before) < 1e-9


def test_the_sections_of_a_config_become_the_paces_of_the_training_data():
    schedule = {
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8},
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"seqlen_reshape": schedule}}
    kept = {
        "min_value": 16,
        "max_value": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 9, "seq_per_step": 16},
    }
    random_ltd = {
        "enabled": True,
        "random_ltd_layer_id": [1],
        "random_ltd_schedule": kept,
    }
    raw = {
        "model": {"num_layers": 3, "num_heads": 1, "embed_dim": 8, "max_length": 32},
        "data": {"sequence_length": 32},
        "train_batch_size": 4,
        "data_efficiency": {
            "enabled": True,
            "seed": 3,
            "data_sampling": {"enabled": True, "curriculum_learning": curriculum},
            "data_routing": {"enabled": True, "random_ltd": random_ltd},
        },
    }
    made = dataset(Config.load(raw), "train")
    assert isinstance(made, Paced) and made.reshapes
    assert made.length is not None and made.length.buckets == (8, 16, 24, 32)
    assert made.dropping is not None and made.dropping.num_layers == 1
    assert (made.dropping.kept.first, made.dropping.seed) == (0, 3)
    assert isinstance(dataset(Config.load(raw), "validation"), Share)
    # The rows of a batch are more than train_batch_size, in whole pieces of samples.
    batch = next(iter(made))
    assert batch["tokens"].shape == (16, 9)
    check_rows(batch, Config.load(raw))
    with pytest.raises(ValueError, match="the config asks for 4"):
        check_rows({"tokens": batch["tokens"][:6]}, Config.load(raw))
