"""Which ends of an attempt start a run again, and which end it: no Ray needed."""

import pytest

from zinf.ray.options import parse_resources, scaling
from zinf.ray.record import Attempt, Cause, Ended, Event, Failure, seconds_to_recover
from zinf.ray.restart import Restarts, WorkersLost
from zinf.ray.settings import FailureConfig, ScalingConfig

LOST = Ended(Cause.LOST, "Worker 1 of 2 was lost: its worker process has died.")
PREEMPTED = Ended(Cause.PREEMPTED, "Worker 0 of 2 was told to leave.")


def failed(error: Exception, said: str = "step 7") -> Ended:
    bases = tuple(base.__name__ for base in type(error).__mro__)
    text = f"{type(error).__name__}: {error}"
    failure = Failure(text, "Traceback of the worker", said, bases, error)
    return Ended(Cause.FAILED, f"Worker 1 of 2 failed: {text}", failure)


def test_lost_workers_are_replaced_as_often_as_allowed():
    restarts = Restarts(FailureConfig(max_failures=2))
    restarts.after(LOST)
    restarts.after(LOST)
    with pytest.raises(WorkersLost, match="has died.*\n.*restarted 2 times") as found:
        restarts.after(LOST)
    assert "--max-failures" in str(found.value)


def test_preemptions_have_a_count_of_their_own():
    restarts = Restarts(FailureConfig(max_failures=0, max_preemption_failures=1))
    restarts.after(Ended(Cause.RESIZED))
    restarts.after(PREEMPTED)
    with pytest.raises(WorkersLost, match="max_preemption_failures"):
        restarts.after(PREEMPTED)


def test_minus_one_is_no_limit():
    restarts = Restarts(FailureConfig(max_failures=-1, max_preemption_failures=-1))
    for ended in (LOST, PREEMPTED) * 10:
        restarts.after(ended)
    assert (restarts.num_failures, restarts.num_preemptions) == (10, 10)


def test_an_error_at_the_same_step_twice_ends_the_run_and_is_told_with_its_place():
    restarts = Restarts(FailureConfig(max_failures=-1))
    restarts.after(failed(OSError("disk"), "step 7"))
    restarts.after(failed(OSError("disk"), "step 8"))
    restarts.after(failed(OSError("another disk"), "step 8"))
    with pytest.raises(OSError, match="^disk") as found:
        restarts.after(failed(OSError("disk"), "step 8"))
    assert found.value.__notes__ == ["Worker 1 of 2 failed, which last said 'step 8'."]
    assert "Traceback of the worker" in str(found.value.__cause__)


def test_an_error_of_the_program_ends_the_run_at_once():
    for error in (ValueError("x"), KeyError("x"), ZeroDivisionError("x")):
        with pytest.raises(type(error)):
            Restarts(FailureConfig(max_failures=-1)).after(failed(error))
    # What Ray itself raised is told as text.
    failure = Failure("Odd: x", "Traceback", "step 1", ("ValueError",), None)
    with pytest.raises(RuntimeError, match="failed: Odd: x\nTraceback"):
        text = "Worker 1 of 2 failed: Odd: x"
        Restarts(FailureConfig()).after(Ended(Cause.FAILED, text, failure))
    with pytest.raises(KeyboardInterrupt):
        Restarts(FailureConfig()).after(Ended(Cause.INTERRUPTED))


def test_workers_that_run_different_versions_are_told_apart():
    unlike = pytest.importorskip("zinf.ray.board").unlike
    values = [{"jax": "0.11", "numpy": "2.4"}, {"jax": "0.12", "numpy": "2.4"}]
    assert unlike(values).endswith("\n  jax: 0.11 on process 0; 0.12 on process 1")
    assert unlike([values[0]] * 2) == ""


@pytest.mark.parametrize("numbers", [0, (0, 2), (3, 2), -1])
def test_numbers_of_workers_are_checked(numbers):
    with pytest.raises(ValueError, match="num_workers is .*--min-workers"):
        ScalingConfig(numbers)


def test_workers_and_resources_of_the_command_line():
    found = scaling(4, 2, "GPU=8, CPU=32")
    assert (found.fewest, found.most) == (2, 4)
    assert found.resources_per_worker == {"GPU": 8.0, "CPU": 32.0}
    assert (scaling(None, None, "CPU=1").most, scaling(3, None, "CPU=1").fewest) == (
        1,
        3,
    )
    with pytest.raises(ValueError, match="--worker-resources is 'GPU'"):
        parse_resources("GPU")
    with pytest.raises(ValueError, match="something that Ray counts"):
        scaling(1, 1, "CPU=0")


def test_seconds_to_recover_add_up_to_the_time_of_the_first_step():
    before = Attempt(0, 2, began=0.0, noticed=100.0)
    texts = {
        104.0: "joined",
        105.0: "preparing",
        106.5: "loading the checkpoint of step 6",
        107.0: "step 7",
        109.0: "done with step 7",
        110.0: "step 8",
    }
    after = Attempt(1, 2, began=101.0)
    after.events = [Event(time, 0, text) for time, text in texts.items()]
    found = seconds_to_recover(before, after)
    assert found == {"restart": 5.0, "compile": 1.5, "load": 0.5, "step": 2.0}
    assert sum(found.values()) == 109.0 - before.noticed
