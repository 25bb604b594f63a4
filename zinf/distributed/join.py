"""How the processes of a run come together, before any of them touches a device."""

import os
import socket
import time

import jax

from zinf.distributed.fingerprint import code_fingerprint, device_fingerprint
from zinf.distributed.group import AbstractGroup, Alone, Joined
from zinf.distributed.hub import Hub
from zinf.distributed.limits import Limits
from zinf.distributed.seat import JoinError, Seat
from zinf.distributed.wire import Wire

RETRY_SECONDS = 0.2
ATTEMPT_SECONDS = 5.0
LIMITS = Limits()


def join(seat: Seat | None, limits: Limits = LIMITS) -> AbstractGroup:
    """This process's group, with `jax.distributed` initialized among it.

    To be called before anything starts a jax backend. Processes that run other code or
    bring other devices end here, all of them, with an error that says how they differ.

    Args:
        seat: From `find_seat`; None: a run of one process.

    Raises:
        JoinError: The coordinator cannot be reached, or its port cannot be had.
    """
    if seat is None:
        return Alone()
    hub = None
    if seat.index == 0:
        hub = Hub(_listener(seat), seat.count, limits)
    wire = _connect(seat, limits)
    group = Joined(wire, hub, index=seat.index, count=seat.count, limits=limits)
    try:
        _introduce(seat, wire)
        # The hub has the deadline: it knows who is missing.
        group.barrier("join", timeout=None)
        group.agree(code_fingerprint())
        _initialize(seat, group, limits)
        group.agree(device_fingerprint())
    except BaseException as error:
        group.fail(error)
        raise
    return group


def _introduce(seat: Seat, wire: Wire) -> None:
    place = {"index": seat.index, "count": seat.count}
    wire.send({**place, "host": socket.gethostname(), "pid": os.getpid()})


def _listener(seat: Seat) -> socket.socket:
    _, port = seat.address
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    named = {"family": family, "dualstack_ipv6": both, "backlog": seat.count}
    try:
        return socket.create_server(("", port), **named)
    except OSError as error:
        raise JoinError(
            f"Process 0 cannot listen on port {port} of this host "
            f"({socket.gethostname()}): {error.strerror}. Another program has it, or a "
            "second process 0; choose another port for --coordinator."
        ) from error


def _connect(seat: Seat, limits: Limits) -> Wire:
    """To the hub, which may start later than this process."""
    deadline = time.monotonic() + limits.join_seconds
    while True:
        try:
            connection = socket.create_connection(seat.address, ATTEMPT_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(_unreachable(seat, limits, error)) from error
            time.sleep(RETRY_SECONDS)
    connection.settimeout(limits.silence_seconds)
    return Wire(connection)


def _unreachable(seat: Seat, limits: Limits, error: OSError) -> str:
    return (
        f"Process {seat.index} of {seat.count} could not reach the coordinator "
        f"{seat.coordinator} ({seat.launcher}) within {limits.join_seconds:g} s: "
        f"{error}. It must be an address of the host where process 0 runs, with a port "
        "that no firewall closes; see the output of process 0, or allow more time with "
        "--join-timeout."
    )


def _initialize(seat: Seat, group: AbstractGroup, limits: Limits) -> None:
    """jax.distributed, at a port that process 0 has free."""
    host, _, _ = seat.coordinator.rpartition(":")
    address = group.broadcast("jax address", f"{host}:{_free_port()}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM, so that nothing could end a run but SIGKILL.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        seat.count,
        seat.index,
        list(seat.local_device_ids),
        "deactivate",
        initialization_timeout=round(limits.join_seconds) + 1,
        # Its news of a lost process is an abort with a C++ stack: ours comes first.
        heartbeat_timeout_seconds=3 * round(limits.silence_seconds) + 10,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]
