"""`zinf.ray.fit`: runs a training function on the workers of a Ray cluster."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zinf.distributed import Limits
from zinf.ray.attempt import Listener, Watch
from zinf.ray.board import BoardActor
from zinf.ray.cluster import Say, connected, has_room_for_more, place
from zinf.ray.group import RayGroup
from zinf.ray.record import Attempt, Cause, Ended
from zinf.ray.restart import Restarts
from zinf.ray.settings import FailureConfig, ScalingConfig
from zinf.ray.worker import Post

ONE_WORKER = ScalingConfig()
FAILURES = FailureConfig()
LIMITS = Limits()
COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The results of a run.

    Attributes:
        values: what the function returned, by worker.
        metrics: those of the last step.
        attempts: all attempts, with their events; the last one was done.
    """

    values: Sequence[Any]
    metrics: Mapping[str, Any]
    attempts: Sequence[Attempt]


def fit(
    function: Callable[[RayGroup], Any],
    *,
    scaling: ScalingConfig = ONE_WORKER,
    failure: FailureConfig = FAILURES,
    storage: Path | str | None = None,
    address: str | None = None,
    limits: Limits = LIMITS,
    on_metrics: Callable[[Mapping[str, Any]], None] | None = None,
    say: Say = print,
) -> Fitted:
    """Run `function` on all workers of a cluster, again if a worker is lost.

    Each worker is a process of its own, connected to the others by `jax.distributed`. A
    worker that dies, freezes, hangs or is told to leave ends the attempt for all. Then
    all begin anew, in new processes, with as many workers as there is room for. A
    function that ends with `zinf.Trainer(..., checkpoints=...).run()` goes on from its
    last checkpoint, with the batches and the order of an undisturbed run.

    Args:
        function: called with the group of an attempt's workers, to pass to
            `zinf.initialize(group=)` and, as `(group.index, group.count)`, to
            `zinf.data.Share`. If `group.is_asked_to_stop` becomes true on any worker,
            all are to save and raise KeyboardInterrupt, as `zinf.Trainer` does. It and
            its value are pickled.
        storage: a folder that all hosts share, where checkpoints are too. Whether it is
            one folder is checked. Compiled programs are kept in its subfolder
            `compiled`, so that a restart does not compile again.
        address: HOST:PORT of a cluster, or "auto" for one that runs on this host. None
            starts a cluster on this host, for this run alone.
        limits: how long workers wait for one another.
        on_metrics: called with the metrics of each step, in this process.
        say: called with each line that worker 0 prints, and with a line per restart.

    Raises:
        NotEnoughNodes: the cluster has no room for the fewest workers.
        WorkersLost: workers were lost more often than `failure` allows.
        KeyboardInterrupt: after Ctrl-C, when the step was completed and saved.
        ConnectionError: the cluster cannot be reached.
        Exception: the function's own error, if it was raised at the same step twice, or
            is one of the program itself, such as a ValueError.
    """
    latest: dict[str, Any] = {}

    def hear(metrics: Mapping[str, Any]) -> None:
        latest.clear()
        latest.update(metrics)
        if on_metrics is not None:
            on_metrics(metrics)

    folder = None if storage is None else Path(storage).absolute()
    attempts: list[Attempt] = []
    restarts = Restarts(failure)
    with connected(address, scaling), _board() as board:
        run = _Run(function, scaling, failure, folder, limits, Listener(say, hear))
        while True:
            attempt = Attempt(len(attempts), 0, time.time())
            attempts.append(attempt)
            ended = run.attempt(attempt, board)
            if ended.cause is Cause.DONE:
                return Fitted(ended.values, latest, attempts)
            try:
                restarts.after(ended)
            except Exception as error:
                if attempt.count < scaling.most:
                    error.add_note(_shrunk(attempt.count, scaling))
                raise
            say(f"{ended.text}\nAll workers end; the run goes on by itself.")


@contextlib.contextmanager
def _board() -> Generator[Any, None, None]:
    """The board of a run, on the driver's own node: it ends with the driver anyway."""
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    board = BoardActor.options(scheduling_strategy=here).remote()
    try:
        yield board
    finally:
        ray.kill(board)


@dataclass(frozen=True, slots=True)
class _Run:
    """What all attempts of a run have in common: the arguments of `fit`."""

    function: Callable[[RayGroup], Any]
    scaling: ScalingConfig
    failure: FailureConfig
    storage: Path | None
    limits: Limits
    listener: Listener

    def attempt(self, attempt: Attempt, board: Any) -> Ended:
        """Run the function once on as many workers as there is room for."""
        scaling, limits, say = self.scaling, self.limits, self.listener.say
        places = place(scaling, patience_seconds=limits.join_seconds, say=say)
        try:
            attempt.count = places.bundle_count
            # Waiting for room is no part of the time that workers have to join.
            attempt.began = time.time()
            if attempt.number:
                say(f"Restart {attempt.number}, with {attempt.count} workers.")
            watch = Watch(
                attempt,
                board,
                limits,
                self.listener,
                has_more_room=partial(has_room_for_more, scaling, attempt.count),
                check_seconds=scaling.elastic_resize_monitor_interval_s,
            )
            posts = [self._post(attempt, index) for index in range(attempt.count)]
            watch.start(places, posts, scaling.resources_per_worker, self.function)
            return watch.until_end()
        finally:
            ray.util.remove_placement_group(places)

    def _post(self, attempt: Attempt, index: int) -> Post:
        return Post(
            attempt.number,
            index,
            attempt.count,
            limits=self.limits,
            folder=Path.cwd(),
            storage=self.storage,
            compiled=None if self.storage is None else self.storage / COMPILED,
            preemption_grace_s=self.failure.preemption_grace_s,
        )


def _shrunk(count: int, scaling: ScalingConfig) -> str:
    return (
        f"This attempt had {count} of {scaling.most} workers, all that the cluster had "
        "room for. If the run cannot have that number, as when its batch does not "
        f"divide among {count}, raise num_workers' lower end (--min-workers), so that "
        "it waits for more."
    )
