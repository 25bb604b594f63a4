"""Processes that begin with different values say so, and train nothing."""

import json

import pytest

from tests.distributed.processes import Ended, free_port, run_all

COUNT = 3
# All of them look at the same three processes.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    at, folder = f"127.0.0.1:{free_port()}", str(tmp_path_factory.mktemp("beginning"))
    lines = [[at, str(COUNT), str(index), folder] for index in range(COUNT)]
    processes = run_all("beginning", lines)
    for process in processes:
        assert process.code == 0, process.output
    return processes


def said(process: Ended, name: str) -> str:
    (line,) = [x for x in process.output.splitlines() if x.startswith(f"{name}:")]
    return json.loads(line.removeprefix(f"{name}:"))


REFUSED = {
    "an array": "b",
    "an init function": "w",
    "model state": "model_state/seen",
    "rng": "rng",
}


def test_different_beginnings_are_refused_with_the_array_and_the_process(ended):
    for process in ended:
        for case, array in REFUSED.items():
            text = said(process, f"{case} refused")
            assert "do not begin alike: 1 of " in text
            assert f"\n  {array}: " in text
            assert "on processes 0-1; " in text
            assert "on process 2\n" in text
            assert "one seed" in text


def test_equal_beginnings_train_and_a_restore_makes_different_ones_alike(ended):
    for case in ("lying apart", "made"):
        losses = {said(process, f"{case} trained") for process in ended}
        assert len(losses) == 1
    assert [said(process, "restored") for process in ended] == [2] * COUNT
