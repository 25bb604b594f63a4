"""`zinf plan --longest`: the longest sequence whose step fits."""

from functools import partial

import pytest
import yaml

from tests.command import run as zinf
from zinf.cli.longest import LENGTHS_PER_DOUBLING, candidates, last_fitting

CONFIG = {
    "model": {"num_layers": 1, "num_heads": 1, "embed_dim": 16, "max_length": 48},
    "data": {"sequence_length": 16},
    "train_batch_size": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


run = partial(zinf, "plan", "--longest")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.mark.parametrize("unit", [1, 3, 8])
@pytest.mark.parametrize("start", [1, 1024, 1 << 19])
@pytest.mark.parametrize("fitting", [30, 5_000, 500_000, 1 << 40])
def test_the_search_finds_the_last_length_that_fits_in_few_plans(unit, start, fitting):
    lengths, asked = candidates(unit, 1_000_001, "max_length"), []

    def fits(length):
        asked.append(length)
        return length <= fitting

    first = max((i for i, n in enumerate(lengths) if n <= start), default=0)
    found = last_fitting(fits, lengths, first)
    assert [n <= fitting for n in lengths].count(True) == found + 1
    assert all(n % unit == 0 for n in lengths) and lengths[-1] > 1_000_001 - unit
    # One in two doublings between the first length and the last, and those between two.
    assert len(asked) == len({*asked}) <= 10 + (2 * LENGTHS_PER_DOUBLING).bit_length()


def test_the_longest_sequence_is_planned_and_nothing_else_is_made(file, tmp_path):
    shown = run(file, "--set", "mesh={fsdp: 1, seq: 2}").stdout
    assert "16 tokens fit: " in shown and "48 tokens fit: " in shown
    assert "The longest sequence that fits has 48 tokens." in shown
    assert "model.max_length allows no more. 2 plans in " in shown
    assert "budget\ndevice" in shown and "fixed rates" in shown
    assert [x.name for x in tmp_path.iterdir()] == ["small.yaml"]


def test_what_fits_at_no_length_and_mistakes_are_one_clean_message(file):
    small = ("memory.device=2KiB", "memory.host=2KiB")
    settings = [x for text in small for x in ("--set", text)]
    shown = run(file, *settings, code=1).stdout
    assert "16 tokens do not fit: " in shown and "bytes of the " in shown
    assert "No sequence fits, not even one of 8 tokens. 2 plans in " in shown
    seven = ("model.max_length=7", "data.sequence_length=7", "mesh={fsdp: 1, seq: 8}")
    for options, message in (
        (("--generate",), "searches a length for training"),
        (("--all",), "Leave --generate, --all"),
        (("--set", "model=null"), "has no model section"),
        ([x for text in seven for x in ("--set", text)], "7 tokens, which mesh.seq"),
    ):
        found = run(file, *options, code=2)
        assert message in " ".join(found.output.split()), found.output
