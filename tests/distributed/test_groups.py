"""Real processes that come together, and end together when one of them does not."""

import re
import signal
from collections.abc import Sequence

import pytest

from tests.distributed.member import HANG_SECONDS, SILENCE_SECONDS, WORDS
from tests.distributed.processes import DEVICES, Ended, run_members
from zinf.distributed.group import ENDED_BY_ANOTHER

# Of one that does not say why, as an uncaught exception.
FAILED = 1


def assert_all_say(processes: Sequence[Ended], *patterns: str) -> None:
    """Each ended for another's sake, with an error of its own that has the patterns."""
    assert processes
    for process in processes:
        assert process.code == ENDED_BY_ANOTHER, process.output
        for pattern in patterns:
            assert re.search(pattern, process.error), process.output


def test_processes_sum_over_all_their_devices_and_exchange_values():
    count = 3
    everything = range(1, count * DEVICES + 1)
    gathered = [{"index": index} for index in range(count)]
    for process in run_members(["talk"] * count):
        assert process.code == 0, process.output
        for line in (
            f"sum {float(sum(everything))} {count * DEVICES}",
            f"gathered {gathered}",
            f"again {list(range(count))}",
            "first 0",
            "any True",
            "none False",
        ):
            assert line in process.output.splitlines()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_inside_their_collective(victim):
    parts = ["work", "work", "work"]
    parts[victim] = "perish"
    ended = run_members(parts)
    killed = ended.pop(victim)
    assert killed.code == -signal.SIGKILL
    assert_all_say(
        ended,
        f"^Process {victim} of 3\\b.* is lost: .*connection.* closed",
        f"last said '{WORDS}'",
    )


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_shows_no_life_is_lost(victim):
    parts = ["watch", "watch"]
    parts[victim] = "freeze"
    ended = run_members(parts)
    assert_all_say(
        [ended[1 - victim]],
        f"^Process {victim} of 2\\b.* is lost: no sign of life for "
        f"{SILENCE_SECONDS:g} s",
    )


def test_a_process_that_hangs_ends_all_and_is_named():
    assert_all_say(
        run_members(["dawdle", "stray"]),
        f"^Process 1 of 2 made no progress for {HANG_SECONDS:g} s",
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_one_process_ends_all_with_its_message(victim):
    parts = ["work", "work"]
    parts[victim] = "err"
    ended = run_members(parts)
    failed, fine = ended[victim], ended[1 - victim]
    assert failed.code == FAILED
    assert "Traceback" in failed.output
    message = "No space left on device: '/drive/chunk'\nFree some space."
    assert message in failed.output
    assert_all_say(
        [fine], f"^Process {victim} of 2 .* failed: OSError: ", re.escape(message)
    )


def test_an_unreachable_coordinator_is_an_error_that_names_it():
    (process,) = run_members(["talk"], ids=[1], count=2, join_seconds=1.0)
    assert process.code == FAILED
    for part in (
        "JoinError: Process 1 of 2 could not reach the coordinator 127.0.0.1:",
        "(flags) within 1 s",
        "Connection refused",
        "--join-timeout",
    ):
        assert part in process.output


@pytest.mark.slow
def test_a_second_process_0_on_this_host_says_that_the_port_is_taken():
    ended = run_members(["talk"] * 2, ids=[0, 0], count=2, join_seconds=5.0)
    taken = [one for one in ended if "cannot listen on port" in one.output]
    (late,) = [one for one in ended if one not in taken]
    assert [one.code for one in taken] == [FAILED]
    assert_all_say([late], "^Process 1 of 2 did not join")


def test_different_code_is_told_apart_before_jax_starts():
    ended = run_members(["old_code", "talk"])
    assert_all_say(ended, "\n  zinf source: 0ld on process 0; [0-9a-f]{12} on process")
    assert not any("Gloo" in process.output for process in ended)
