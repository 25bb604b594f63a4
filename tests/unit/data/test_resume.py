"""Datasets resume at any step on any number of processes, and know their shapes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from zinf.core.config.pace import Pace
from zinf.core.config.pacing import Pacing
from zinf.core.step.batch import batch_spec, by_microbatch
from zinf.data import (
    CurriculumSamples,
    DifficultyIndex,
    Dropping,
    Metric,
    Paced,
    Share,
    Taught,
    TokenBatches,
    make_buckets,
    text_dataset,
)

ROWS, WINDOW, PARTS = 8, 17, 2
STEPS = 18
Batch = dict[str, np.ndarray]


def pace(**total: int) -> Pace:
    """Lengths of 4, 8, 12 and 16 tokens."""
    schedule = {
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"difficulty_step": 4, **total},
    }
    first = 0 if total == {"total_curriculum_step": 9} else 1
    return Pace.of(Pacing.model_validate(schedule), 8, first=first)


BY_STEP = pace(total_curriculum_step=12)
BY_TOKEN = pace(total_curriculum_tokens=12 * ROWS * 8)
DROPPING = Dropping(pace(total_curriculum_step=9), num_layers=3, seed=7)


def source(count: int = 60) -> grain.MapDataset:
    rows = np.arange(count * WINDOW, dtype=np.int32).reshape(count, WINDOW)
    return grain.MapDataset.source([{"tokens": r, "id": r[0]} for r in rows])


def share(folder: Path, **named: Any) -> Share:
    return Share(source().shuffle(5).repeat(None), ROWS, **named)


def text(folder: Path, **named: Any) -> grain.IterDataset:
    (folder / "text").write_bytes(bytes(range(1, 201)))
    settings = {"sequence_length": 4, "split": "train", "validation_fraction": 0.0}
    settings |= {"batch_size": ROWS, "seed": 0, **named}
    return text_dataset([str(folder / "text")], **settings)


def curriculum(folder: Path, **named: Any) -> grain.IterDataset:
    index = DifficultyIndex(folder, np.arange(60)[::-1], None, np.zeros(0))
    metric = Metric("m", lambda step: 2 + step, index, "percentile", highest=20)
    samples = CurriculumSamples(source(), [metric], batch_size=ROWS, seed=5)
    return Share(samples, ROWS, **named)


def paced(folder: Path, options: dict[str, Any], **named: Any) -> Paced:
    return Paced(share(folder, **named), **options)


class Lengths(grain.sources.RandomAccessDataSource):
    """Sample i is its number `lengths[i]` times, padded with -1."""

    lengths = np.random.default_rng(0).integers(1, 25, 61)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Batch:
        row = np.full(24, -1, np.int32)
        row[: self.lengths[index]] = index
        return {"input_ids": row, "labels": row}


def token_batches(folder: Path, **named: Any) -> TokenBatches:
    lengths = Lengths.lengths
    buckets = make_buckets(lengths, max_tokens=96, max_buckets=4, min_batch_size=4)
    return TokenBatches(Lengths(), lengths, buckets, **named)


def taught(folder: Path, **named: Any) -> Taught:
    return Taught(share(folder, **named), lambda b: b["tokens"] * 2.0, until_step=5)


DATASETS: dict[str, Callable[..., grain.IterDataset]] = {
    "text": text,
    "curriculum": curriculum,
    "truncated": partial(paced, options={"length": BY_STEP}),
    "cut by tokens": partial(paced, options={"length": BY_TOKEN, "reshapes": True}),
    "dropping": partial(paced, options={"dropping": DROPPING}),
    "cut and dropping": partial(
        paced, options={"length": BY_STEP, "reshapes": True, "dropping": DROPPING}
    ),
    "token batches": token_batches,
    "taught": taught,
}


def together(make: Callable, count: int, steps: int, state: Any = None) -> Any:
    """The microbatches that all processes have in each step, and the state after."""
    readers = [
        iter(make(process=(i, count), num_microbatches=PARTS)) for i in range(count)
    ]
    for reader in readers if state is not None else ():
        reader.set_state(state)
    found = []
    for _ in range(steps):
        shares = [next(reader) for reader in readers]
        cut = [by_microbatch(x, batch_spec(x, PARTS), PARTS) for x in shares]
        joined = {name: np.concatenate([c[name] for c in cut], 1) for name in cut[0]}
        found.append(joined)
    states = [reader.get_state() for reader in readers]
    assert all(state == states[0] for state in states)
    return found, json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("name", DATASETS)
def test_a_run_resumes_at_any_step_on_any_number_of_processes(name, tmp_path):
    make = partial(DATASETS[name], tmp_path)
    undisturbed, _ = together(make, 1, STEPS)
    for stop, before, after in ((0, 1, 2), (7, 2, 4), (13, 4, 1)):
        first, state = together(make, before, stop)
        rest, _ = together(make, after, STEPS - stop, state)
        for batch, expected in zip(first + rest, undisturbed, strict=True):
            assert batch.keys() == expected.keys()
            for leaf, values in expected.items():
                np.testing.assert_array_equal(batch[leaf], values)


def shapes(batch: Any) -> dict[str, Any]:
    return {name: (x.shape, np.dtype(x.dtype).name) for name, x in batch.items()}


@pytest.mark.parametrize("name", [*DATASETS][2:-1])
def test_the_shapes_that_come_are_known_ahead(name, tmp_path):
    """Those of the next steps alone, so that no plan is made in vain."""
    reader, batches = iter(DATASETS[name](tmp_path)), []
    coming = {}
    for step in range(STEPS + 12):
        batches.append(shapes(next(reader)))
        if step in (0, 3, 8, STEPS):
            for count in (0, 1, 5, 11):
                coming[step, count] = list(map(shapes, reader.coming(count)))
    for (step, count), found in coming.items():
        expected = []
        for batch in batches[step + 1 : step + 1 + count]:
            expected += [batch] * (batch not in expected)
        assert found == expected, (step, count)


def test_the_largest_batch_is_known_after_one(tmp_path):
    for name in ("truncated", "cut by tokens", "dropping"):
        reader = iter(DATASETS[name](tmp_path))
        next(reader)
        assert reader.whole()["tokens"].shape == (ROWS, WINDOW)
    reader = iter(token_batches(tmp_path, num_microbatches=PARTS))
    sizes = [next(reader)["input_ids"].shape for _ in range(40)]
    most = max(sizes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    assert reader.whole()["input_ids"].shape == most


@pytest.mark.parametrize(("count", "num_microbatches"), [(3, 1), (2, 8), (1, 3)])
def test_a_batch_that_does_not_divide_is_refused(count, num_microbatches):
    found = f"8 samples .* {num_microbatches} micro.* {count} proc.*multiple of "
    named = {"process": (0, count), "num_microbatches": num_microbatches}
    with pytest.raises(ValueError, match=f"{found}{count * num_microbatches}"):
        Share(source(), ROWS, **named)
