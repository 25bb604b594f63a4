"""Sequences get longer as the schedule says, and layers keep as many tokens."""

import grain
import numpy as np
import pytest

from tests.unit.data.test_resume import (
    BY_STEP,
    BY_TOKEN,
    DROPPING,
    ROWS,
    WINDOW,
    pace,
    share,
)
from zinf.cli.task import task_of
from zinf.core.config import Config
from zinf.core.config.pace import Pace, counted_steps
from zinf.core.config.pacing import Pacing
from zinf.core.step.batch import check_rows
from zinf.data import Paced, Share, describe

LONGEST = WINDOW - 1


def paced(**options) -> Paced:
    return Paced(share(None), **options)


def take(data, count):
    return [batch for _, batch in zip(range(count), data, strict=False)]


def test_rows_are_truncated_to_the_length_of_the_step():
    whole = take(share(None), 14)
    for step, batch in enumerate(take(paced(length=BY_STEP), 14)):
        # 4 + 12 * (step + 1) / 12, rounded down to a multiple of 4.
        length = min((5 + step) // 4 * 4, LONGEST)
        expected = whole[step]["tokens"][:, : length + 1]
        np.testing.assert_array_equal(batch["tokens"], expected)
        np.testing.assert_array_equal(batch["id"], whole[step]["id"])


def test_rows_are_cut_into_pieces_that_predict_each_token_once():
    whole = take(share(None), 2)
    for batch, row in zip(take(paced(length=BY_STEP, reshapes=True), 2), whole):  # noqa: B905
        assert batch["tokens"].shape == (ROWS * 4, 5)
        targets = batch["tokens"][:, 1:].reshape(ROWS, LONGEST)
        np.testing.assert_array_equal(targets, row["tokens"][:, 1:])
        np.testing.assert_array_equal(batch["tokens"][1:4, 0], row["tokens"][0, 4:16:4])
        np.testing.assert_array_equal(batch["id"], np.repeat(row["id"], 4))


def test_tokens_before_a_step_decide_where_the_schedule_counts_them():
    length, seen = BY_TOKEN, 0
    iterator = iter(paced(length=length))
    for step in range(30):
        tokens = next(iterator)["tokens"]
        assert tokens.shape[1] - 1 == length.at(step, seen)
        seen += tokens.shape[0] * (tokens.shape[1] - 1)
    assert iterator.get_state()["tokens"] == seen


def test_few_buckets_stand_for_many_lengths():
    few = Pace.of(Pacing.model_validate(schedule(total_curriculum_step=12)), 2)
    assert few.buckets == (4, 16)
    found = [batch["tokens"].shape[1] - 1 for batch in take(paced(length=few), 20)]
    assert {*found} == {4, 16} and found == sorted(found)


def schedule(low=4, high=16, **settings):
    return {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": {"difficulty_step": 4, **settings},
    }


def test_kept_positions_are_ascending_and_as_many_as_the_schedule_says():
    for step, batch in enumerate(take(paced(dropping=DROPPING), 12)):
        count = min(4 + 12 * step // 9 // 4 * 4, LONGEST)
        assert describe(batch) == {
            "sequence_length": LONGEST,
            "kept_tokens": count,
            "tokens": ROWS * LONGEST,
        }
        if count == LONGEST:
            assert "kept" not in batch
            continue
        kept = batch["kept"]
        assert kept.shape == (ROWS, 3, count) and kept.dtype == np.int32
        assert (np.diff(kept, axis=2) > 0).all()
        # Each row and each layer has its own choice, and each token may be kept.
        assert len(np.unique(kept.reshape(-1, count), axis=0)) > ROWS * 3 // 2
        assert {*kept.ravel().tolist()} == {*range(LONGEST)}


def test_sequences_that_are_no_longer_than_what_is_kept_drop_nothing():
    both = take(paced(length=BY_STEP, dropping=DROPPING), 14)
    for step, batch in enumerate(both):
        length = min((5 + step) // 4 * 4, LONGEST)
        kept = min(4 + 12 * step // 9 // 4 * 4, length)
        found = describe(batch)
        assert (found["sequence_length"], found["kept_tokens"]) == (length, kept)
        assert ("kept" in batch) == (kept < length)


class Other(grain.IterDataset):
    """Batches of a shape."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def __iter__(self):
        return grain.MapDataset.source([self.batch]).to_iter_dataset().__iter__()


SHORT = {"tokens": np.zeros((8, LONGEST), np.int32)}


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"tokens": np.zeros(8)}, {}, r"must have the shape \(rows, tokens\)"),
        ({"x": np.zeros((8, 17))}, {}, "must have the shape .* no such leaf"),
        (SHORT, {}, r"to predict 16 tokens.* \[8, 16\], which predicts 15"),
        (
            SHORT,
            {"length": None, "dropping": DROPPING},
            "to keep 16 tokens.* which predicts 15",
        ),
    ],
)
def test_batches_that_cannot_be_shortened_are_refused(batch, options, message):
    with pytest.raises(ValueError, match=message):
        next(iter(Paced(Other(batch), **{"length": BY_STEP} | options)))


@pytest.mark.parametrize("wrong", [(), (8, 4), (4, 4), (0, 8)])
def test_buckets_that_are_no_lengths_are_refused(wrong):
    with pytest.raises(ValueError, match="bucket"):
        Pace(lambda count: count, wrong)


def test_each_batch_that_is_shortened_is_checked():
    """Whole batches are not checked."""
    seen = []
    taken = take(paced(length=BY_STEP, check=seen.append), 14)
    shorter = [batch for batch in taken if batch["tokens"].shape[1] < WINDOW]
    assert len(shorter) == 11 and all(map(lambda x, y: x is y, seen, shorter))
    assert len(seen) == 11


@pytest.mark.parametrize("reshapes", [False, True])
def test_counted_steps_are_the_tokens_before_each_step_in_whole_steps(reshapes):
    steps, counted = counted_steps(
        24, longest=LONGEST, length=BY_TOKEN, reshapes=reshapes, rows=ROWS
    )
    iterator = iter(paced(length=BY_TOKEN, reshapes=reshapes))
    for step in range(25):
        found = float(np.interp(step, steps, counted))
        tokens = iterator.get_state()["tokens"]
        assert abs(found * LONGEST * ROWS - tokens) < 1e-6 * max(tokens, 1)
        next(iterator)
    # Of pieces of 4, 8 and 16 tokens no token is left out; of 12, 4 of 16 are.
    assert len(steps) == len(counted) <= 5


def test_dropped_tokens_count_less_where_layers_are_counted():
    kept = pace(total_curriculum_step=9)
    steps, counted = counted_steps(12, longest=LONGEST, kept=kept, share=0.5)
    for step in range(12):
        before = sum(0.5 + 0.5 * kept.at(i, 0) / LONGEST for i in range(step))
        assert abs(float(np.interp(step, steps, counted)) - before) < 1e-9


def test_the_sections_of_a_config_become_the_paces_of_the_training_data():
    lengths = schedule(8, 32, total_curriculum_step=9, difficulty_step=8)
    curriculum = {"enabled": True, "curriculum_metrics": {"seqlen_reshape": lengths}}
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
    config = Config.load(raw)
    made = task_of(config).dataset("train")
    assert isinstance(made, Paced) and made.reshapes
    assert made.length is not None and made.length.buckets == (8, 16, 24, 32)
    assert made.dropping is not None and made.dropping.num_layers == 1
    assert (made.dropping.kept.first, made.dropping.seed) == (0, 3)
    assert isinstance(task_of(config).dataset("validation"), Share)
    # The rows of a batch are more than train_batch_size, in whole pieces of samples.
    batch = next(iter(made))
    assert batch["tokens"].shape == (16, 9)
    check_rows(batch, config)
    with pytest.raises(ValueError, match="the config asks for 4"):
        check_rows({"tokens": batch["tokens"][:6]}, config)
