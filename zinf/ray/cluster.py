"""Connects to a Ray cluster, and finds room for workers on it."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from math import floor
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from zinf.ray.settings import ScalingConfig

# Bytes of shared memory that a local Ray takes for objects; zinf sends small ones.
OBJECT_STORE_BYTES = 100 << 20
REACH_SECONDS = 5.0
# Ray reserves free places in a second. Later than this, others have them.
PLACE_SECONDS = 10.0
POLL_SECONDS = 0.5

Say = Callable[[str], None]


class NotEnoughNodes(ConnectionError):
    """The cluster has no room for the fewest workers that a run may have."""


@contextlib.contextmanager
def connected(address: str | None, scaling: ScalingConfig) -> Generator[None]:
    """Connect to a cluster; or start a local one if `address` is None.

    A program that has called `ray.init` keeps its connection, and `address` has no
    effect. A local cluster counts as many CPUs as the workers need, whatever the
    machine has. It has no dashboard and sends no usage statistics.

    Raises:
        ConnectionError: nothing answers at the address, or it refuses this program.
    """
    if ray.is_initialized():
        yield
        return
    if address is None:
        need = scaling.resources_per_worker.get("CPU", 0)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=max(1, floor(need * scaling.most)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    else:
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise unless something listens at HOST:PORT; "auto" passes.

    Raises:
        ValueError: it is not of that form.
        ConnectionError: nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(
            f"The address of the Ray cluster is {address!r}; it must be HOST:PORT, as "
            "`ray start --head` prints it, or auto (--address)."
        )
    # Ray itself tries for a minute, and then does not say what failed.
    try:
        reach = host.strip("[]"), int(port)
        socket.create_connection(reach, REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"No Ray cluster can be reached at {address}: {error}. Start one there "
            "with `ray start --head`, or change --address."
        ) from error


def _connect(address: str) -> None:
    check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"The Ray cluster at {address} did not accept this program: {error}\n"
            "If it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "the file ~/.ray/auth_token to the cluster's. The versions of Ray and "
            "Python must be the cluster's too."
        ) from error


def place(
    scaling: ScalingConfig, *, patience_seconds: float, say: Say
) -> PlacementGroup:
    """Reserve places for as many workers as the cluster has room for.

    If it has no room for the fewest, wait for more nodes.

    Raises:
        NotEnoughNodes: there is no such room after `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    most, has_said = scaling.most, False
    while True:
        count = min(most, num_fitting(scaling))
        if count >= scaling.fewest:
            group = _reserved(scaling, count)
            if group is not None:
                return group
            if num_fitting(scaling) >= count:  # Others use the cluster too.
                most = max(scaling.fewest, count - 1)
        if time.monotonic() > deadline:
            raise NotEnoughNodes(_no_room(scaling, patience_seconds))
        if not has_said:
            say(f"Waiting for nodes. {_room(scaling)}.")
            has_said = True
        time.sleep(POLL_SECONDS)


def _reserved(scaling: ScalingConfig, count: int) -> PlacementGroup | None:
    need = dict(scaling.resources_per_worker)
    group = ray.util.placement_group([need] * count, scaling.placement_strategy)
    deadline = time.monotonic() + PLACE_SECONDS
    is_ready = False
    try:
        # Ray notices a lost node a little after its workers, and would wait for it.
        while not is_ready and num_fitting(scaling) >= count:
            if time.monotonic() > deadline:
                break
            is_ready = group.wait(POLL_SECONDS)
    finally:
        if not is_ready:
            ray.util.remove_placement_group(group)
    return group if is_ready else None


def _no_room(scaling: ScalingConfig, seconds: float) -> str:
    flag = "--min-workers" if scaling.fewest < scaling.most else "--workers"
    return (
        f"{_room(scaling)}; waited {seconds:g} s. Free what else uses the cluster, add "
        f"nodes (`ray start --address=HOST:PORT`), lower {flag}, or allow more time "
        "with --join-timeout."
    )


def _room(scaling: ScalingConfig) -> str:
    need = ", ".join(f"{k} {v:g}" for k, v in scaling.resources_per_worker.items())
    nodes = [
        f"{node['NodeManagerAddress']} ("
        + ", ".join(f"{k} {node['Resources'].get(k, 0):g}" for k in needs(scaling))
        + ")"
        for node in alive()
    ]
    return (
        f"The run needs {scaling.fewest} workers at least, each with {need}, and the "
        f"cluster has room for {num_fitting(scaling)} on {len(nodes)} nodes: "
        f"{', '.join(nodes)}"
    )


def num_fitting(scaling: ScalingConfig) -> int:
    """Number of workers that the nodes have room for, were there nothing else."""
    fitting = [fits(node["Resources"], needs(scaling)) for node in alive()]
    if scaling.placement_strategy == "STRICT_SPREAD":
        fitting = [min(1, number) for number in fitting]
    return sum(fitting)


def has_room_for_more(scaling: ScalingConfig, count: int) -> bool:
    """Whether another worker fits beside the `count` that run."""
    if count >= scaling.most or num_fitting(scaling) <= count:
        return False
    return fits(ray.available_resources(), needs(scaling)) > 0


def fits(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many workers with `need` these resources are enough for."""
    return min(floor(resources.get(name, 0) / amount) for name, amount in need.items())


def needs(scaling: ScalingConfig) -> Mapping[str, float]:
    return {k: v for k, v in scaling.resources_per_worker.items() if v > 0}


def alive() -> Sequence[Mapping[str, Any]]:
    """The nodes that live and are not about to leave."""
    leaving = draining()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in nodes if node["NodeID"] not in leaving]


def draining() -> Collection[str]:
    """Ids of the nodes that are about to leave the cluster.

    Kubernetes, spot instances and TPU maintenance announce it to Ray, and
    `ray drain-node` does by hand. Ray Train reads it in this way too; there is no
    public name for it.
    """
    return ray._private.state.state.get_draining_nodes()
