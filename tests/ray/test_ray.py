"""Runs on a Ray cluster of this machine: lost workers change no loss.

The workers are real processes; these tests need the extra `ray`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tests.distributed.processes import free_port
from tests.ray.training import STEPS, samples, train
from zinf.core.interchange import entries
from zinf.data import Share
from zinf.distributed import Alone, Limits
from zinf.ray import FailureConfig, Fitted, RayGroup, ScalingConfig, fit
from zinf.ray.cluster import NotEnoughNodes, check_address
from zinf.ray.record import Cause
from zinf.ray.worker import check_is_shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Ray starts its processes by fork and exec. Where other tests have used jax before,
    # jax warns of the fork.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
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


def run(
    folder: Path, workers: Any, deed: Any = None, place: Any = None, **more: Any
) -> tuple:
    said: list[str] = []
    give = {} if deed is None else {"deed": deed}
    give |= {"checkpoints": place}
    found = fit(
        partial(train, folder=folder, **give),
        scaling=ScalingConfig(workers, elastic_resize_monitor_interval_s=0.5),
        storage=folder,
        **{"limits": LIMITS, "say": said.append, **more},
    )
    return found, folder, said


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def causes(found: Fitted) -> list[Cause]:
    return [a.ended.cause for a in found.attempts if a.ended is not None]


def disturb(group: RayGroup, step: int) -> None:
    """Kill worker 1 in the first attempt, and tell it to leave in the second."""
    match group.attempt, group.index, step:
        case 0, 1, 6:
            os.kill(os.getpid(), signal.SIGKILL)
        case 1, 1, 8:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_whose_workers_are_killed_and_told_to_leave_has_the_same_losses(
    undisturbed, tmp_path
):
    found, folder, said = run(tmp_path, 2, disturb)
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


def uneven(group: RayGroup) -> None:
    Share(samples(), 13, process=(group.index, group.count))


def test_too_few_nodes_and_a_batch_that_does_not_divide_among_them_are_named(cluster):
    quiet = {"say": lambda line: None}
    limits = Limits(join_seconds=1.0)
    with pytest.raises(NotEnoughNodes, match="needs 9 workers.*room for 2 on 2 nodes"):
        fit(wrong, scaling=ScalingConfig((9, 12)), limits=limits, **quiet)
    with pytest.raises(ValueError, match="13") as found:
        fit(uneven, scaling=ScalingConfig((2, 13)), limits=LIMITS, **quiet)
    (note,) = [note for note in found.value.__notes__ if "of 13 workers" in note]
    assert "does not divide among 2" in note and "--min-workers" in note


def test_a_cluster_that_cannot_be_reached_is_named():
    with pytest.raises(ConnectionError, match="No Ray cluster .* at 127.0.0.1:1: .*"):
        check_address("127.0.0.1:1")
    for address in ("somewhere", ":6379", "host:"):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            check_address(address)


CONNECT = """
import sys
from zinf.ray import ScalingConfig
from zinf.ray.cluster import connected

with connected(sys.argv[1], ScalingConfig()):
    print("connected")
"""


def test_a_missing_token_is_named_and_the_right_one_connects(tmp_path):
    """A cluster of its own, which asks for a token."""
    bin_, port = Path(sys.executable).parent, free_port()
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    outside = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # Ray tries 20 times, a second apart.
    outside |= {"RAY_NUM_REDIS_GET_RETRIES": "2", "HOME": str(tmp_path)}
    address, own = f"127.0.0.1:{port}", f"--node-ip-address=127.0.0.1 --port={port}"
    start = f"{bin_}/ray start --head --block --num-cpus=1 {own}"
    head = subprocess.Popen(
        [*start.split(), "--include-dashboard=false", "--disable-usage-stats"],
        env=outside | secret,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(address)

        def connect(**more: str) -> subprocess.CompletedProcess:
            command = [sys.executable, "-c", CONNECT, address]
            environment = outside | {"PYTHONPATH": os.getcwd()} | more
            return subprocess.run(
                command, env=environment, capture_output=True, text=True
            )

        for wrong in ({}, secret | {"RAY_AUTH_TOKEN": "6" * 64}):
            refused = connect(**wrong)
            assert f"The Ray cluster at {address} did not accept" in refused.stderr
            assert "If it asks for a token, set RAY_AUTH_MODE=token" in refused.stderr
        assert connect(**secret).stdout == "connected\n"
    finally:
        head.terminate()
        head.wait()


def wait_for(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return check_address(address)
        except ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def fall_asleep(group: RayGroup, step: int) -> None:
    if (group.attempt, group.index, step) == (0, 1, 6):
        time.sleep(1000)


def test_a_worker_without_progress_ends_the_attempt_and_is_named(undisturbed, tmp_path):
    """Worker 1 lives and shows it, and takes no step; worker 0 waits for it.

    The run goes on from checkpoints that two workers saved in object storage.
    """
    limits = replace(LIMITS, hang_seconds=25.0)
    place = f"file://{tmp_path}/bucket"
    found, folder, said = run(tmp_path, 2, fall_asleep, place, limits=limits)
    assert causes(found) == [Cause.LOST, Cause.DONE]
    (line,) = [line for line in said if "lost: no progress for 25 s" in line]
    assert "--hang-timeout" in line and "step 6" in line
    assert "Resuming after step 4." in said
    assert losses(folder) == undisturbed
    assert not (folder / "checkpoints").exists()
    steps = [entry.step for entry in entries(place)]
    assert steps == [STEPS - 4, STEPS - 2, STEPS]


class Blind(Alone):
    """Worker 0 of two, of which the other one does not see its files."""

    def gather(self, name: str, value: Any, timeout: float | None = None) -> list[Any]:
        return [value, [False, "other"]]


def test_a_folder_that_another_host_does_not_see_is_an_error_that_names_both(tmp_path):
    with pytest.raises(ValueError, match="not one folder.*worker 1 .other. cannot see"):
        check_is_shared(tmp_path / "run", Blind())
    check_is_shared(tmp_path / "run", Alone())
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_goes_on_with_fewer_nodes_and_with_more_when_they_return(
    cluster, undisturbed, tmp_path
):
    """A node is killed and returns; then Ray announces that it will leave."""
    changes = 0

    def change(metrics: Any) -> None:
        nonlocal changes
        match metrics["step"], changes:
            case 3, 0:
                (node,) = cluster.worker_nodes
                cluster.remove_node(node, allow_graceful=False)
            case 5, 1:
                cluster.add_node(**NODE)
            case 9, 2:
                (node,) = cluster.worker_nodes
                drain(node.node_id)
            case _:
                return
        changes += 1

    found, folder, _ = run(tmp_path, (1, 2), wait, on_metrics=change)
    assert causes(found) == [Cause.LOST, Cause.RESIZED, Cause.PREEMPTED, Cause.DONE]
    assert [attempt.count for attempt in found.attempts] == [2, 1, 2, 1]
    assert losses(folder) == pytest.approx(undisturbed, rel=RELATIVE)


def drain(node: str) -> None:
    """Announce that a node will leave in a minute, as a cloud does."""
    client = ray._private.worker.global_worker.gcs_client
    deadline = int((time.time() + 60) * 1000)
    is_accepted, why = client.drain_node(node, PREEMPTION, "maintenance", deadline)
    assert is_accepted, why


def wait(group: RayGroup, step: int) -> None:
    """Wait until the change of nodes has ended the attempt; it comes in a while."""
    deadline = time.monotonic() + 60
    if (group.attempt, step) in ((0, 5), (1, 7), (2, 11)):
        while not group.is_asked_to_stop and time.monotonic() < deadline:
            time.sleep(0.05)


def test_a_published_model_is_tuned_on_workers_as_in_one_process(tmp_path):
    pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")
    from tests.unit.hf.models import data_file, metrics_of, model_folder

    folder, data = model_folder(tmp_path), data_file(tmp_path, count=24)
    more = ["--steps", "3", "--samples", "4", "--learning-rate", "1e-2"]
    more += ["--set", "bf16.enabled=false"]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    losses = []
    for kind in ([], ["--ray", "--workers", "2"]):
        output = tmp_path / f"tuned{len(kind)}"
        line = ["finetune", folder, "--data", data, "--output", output, *more, *kind]
        line = [sys.executable, "-m", "zinf", *map(str, line)]
        ended = subprocess.run(
            line, env=os.environ | own, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert list(output.glob("*.safetensors"))
        run = output.with_name(f"{output.name}.run")
        losses.append([m["loss"] for m in metrics_of(run)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=RELATIVE)
