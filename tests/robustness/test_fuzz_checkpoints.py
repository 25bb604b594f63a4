"""No damage to a checkpoint is a crash, a wrong value or a file written."""

import json

import numpy as np
import pytest

from scripts.faults.fuzz_checkpoints import FILE, Fuzzed, fuzz

# Each takes 15 ms; the script does thousands.
NUM_CASES = 150


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_or_loaded_as_they_were_saved(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    counts, problems = fuzz(Fuzzed(folder), cases=range(NUM_CASES), seed=1)
    assert problems == []
    assert counts["StorageError"] > NUM_CASES / 2
    assert counts["ValueError"] and counts["loaded, as saved"]


def test_the_fuzzer_sees_a_wrong_load(tmp_path, monkeypatch):
    folder = tmp_path / "inside"
    folder.mkdir()
    fuzzed = Fuzzed(folder)
    array = next(iter(fuzzed.arrays))
    fuzzed.arrays = {**fuzzed.arrays, array: np.flip(fuzzed.arrays[array])}
    monkeypatch.setattr(fuzzed, "damage", lambda choose: set())
    assert "other than saved" in (fuzzed.run(0, 0).problem or "")


def test_the_fuzzer_sees_a_crash_and_what_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "inside"
    folder.mkdir()
    fuzzed = Fuzzed(folder)
    monkeypatch.setattr(fuzzed, "damage", lambda choose: set())
    assert fuzzed.run(0, 0).problem is None
    load = fuzzed.load

    def write():
        (folder / "outside" / "new").touch()
        return load()

    monkeypatch.setattr(fuzzed, "load", write)
    assert fuzzed.run(0, 0).problem == "something was written"
    monkeypatch.setattr("scripts.faults.fuzz_checkpoints.read_arrays", json.loads)
    monkeypatch.setattr(fuzzed, "load", load)
    assert (fuzzed.run(0, 0).problem or "").startswith("TypeError")
    assert (fuzzed.checkpoint / FILE).exists()
