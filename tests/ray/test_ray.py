"""Runs on a Ray cluster of this machine: lost workers change no loss.

The workers are real processes, so these tests are slow; they need the extra `ray`.
"""

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

from tests.ray.training import STEPS, signalled, train
from zinf.distributed import Limits
from zinf.ray import FailureConfig, Fitted, RayGroup, ScalingConfig, fit
from zinf.ray.cluster import NotEnoughNodes
from zinf.ray.record import Cause

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
LIMITS = Limits(join_seconds=120.0, silence_seconds=30.0, hang_seconds=120.0)
# With another number of workers, sums over the batch are taken in another order: a few
# of float32's last bits, through a dozen steps of Adam.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, each with room for one worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("XLA_FLAGS", "")  # one device a worker, not those of the tests
        made = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False}
        )
        made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> dict[int, float]:
    return losses(run(tmp_path_factory.mktemp("undisturbed"), 2)[1])


def run(folder: Path, workers: Any, deed: Any = None, **more: Any) -> tuple:
    said: list[str] = []
    give = {} if deed is None else {"deed": deed}
    found = fit(
        partial(train, folder=folder, **give),
        scaling=ScalingConfig(workers, elastic_resize_monitor_interval_s=0.5),
        storage=folder,
        limits=LIMITS,
        say=said.append,
        **more,
    )
    return found, folder, said


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def causes(found: Fitted) -> list[Cause]:
    return [a.ended.cause for a in found.attempts if a.ended is not None]


class Disturbing:
    """Kills worker 1 in the first attempt and tells it to leave in the second."""

    def __call__(self, group: RayGroup, step: int) -> None:
        match group.attempt, group.index, step:
            case 0, 1, 6:
                signalled(signal.SIGKILL)()
            case 1, 1, 8:
                signalled(signal.SIGTERM)()


def test_a_run_whose_workers_are_killed_and_told_to_leave_has_the_same_losses(
    undisturbed, tmp_path
):
    found, folder, said = run(tmp_path, 2, Disturbing())
    assert causes(found) == [Cause.LOST, Cause.PREEMPTED, Cause.DONE]
    assert losses(folder) == undisturbed
    assert len(undisturbed) == len(set(undisturbed.values())) == STEPS
    # Step 4 was the last one saved before the kill; the one told to leave saved step 8.
    assert [s for s in said if s.startswith("Resuming")] == [
        "Resuming after step 4.",
        "Resuming after step 8.",
    ]
    assert sum("Worker 1 of 2 was lost" in line for line in said) == 1
    assert len({*found.attempts[-1].pids.values()} & {*found.values}) == 2
    assert list((folder / "compiled").iterdir())


def test_a_run_goes_on_with_fewer_nodes_and_with_more_when_they_return(
    cluster, undisturbed, tmp_path
):
    count = 2

    def change(metrics: Any) -> None:
        nonlocal count
        if metrics["step"] == 3 and count == 2:
            cluster.remove_node(list(cluster.worker_nodes)[-1], allow_graceful=False)
            count = 1
        elif metrics["step"] == 5 and count == 1:
            cluster.add_node(**NODE)
            count = 3

    found, folder, _ = run(tmp_path, (1, 2), partial(slow, 0.5), on_metrics=change)
    assert causes(found) == [Cause.LOST, Cause.RESIZED, Cause.DONE]
    assert [attempt.count for attempt in found.attempts] == [2, 1, 2]
    assert losses(folder) == pytest.approx(undisturbed, rel=RELATIVE)


def slow(seconds: float, group: RayGroup, step: int) -> None:
    time.sleep(seconds)


class Wrong(ValueError):
    """An error that cannot be unpickled."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def wrong(group: RayGroup) -> None:
    raise Wrong("a wrong config", 1)


def flaky(group: RayGroup) -> None:
    group.say(f"step {group.attempt}")
    raise OSError("a flaky drive")


def test_errors_that_would_come_again_are_not_retried_and_told_once(cluster, tmp_path):
    said: list[str] = []
    options = {"limits": LIMITS, "say": said.append}
    with pytest.raises(ValueError, match="^a wrong config") as found:
        fit(wrong, **options)
    assert "Worker 0 of 1" in found.value.__notes__[0]
    assert said == []
    failure = FailureConfig(max_failures=1)
    with pytest.raises(OSError, match="^a flaky drive"):
        fit(flaky, failure=failure, **options)
    assert [line for line in said if line.startswith("Restart")] == [
        "Restart 1, with 1 workers."
    ]


def test_too_few_nodes_are_named(cluster):
    limits = Limits(join_seconds=1.0)
    with pytest.raises(NotEnoughNodes, match="needs 9 workers.*room for 2 on 2 nodes"):
        fit(wrong, scaling=ScalingConfig((9, 12)), limits=limits, say=lambda line: None)
