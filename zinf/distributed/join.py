"""Connects the processes of a run, before any of them touches a device."""

import logging
import socket
import time

from zinf.distributed.fingerprint import code_fingerprint, device_fingerprint
from zinf.distributed.greeting import introduce
from zinf.distributed.group import AbstractGroup, Alone, Joined
from zinf.distributed.hub import Hub
from zinf.distributed.jax_service import start_jax
from zinf.distributed.limits import Limits
from zinf.distributed.listen import bound_socket, is_loopback
from zinf.distributed.seat import JoinError, Seat
from zinf.distributed.wire import MESSAGE_BYTES, Wire

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
ATTEMPT_SECONDS = 5.0
LIMITS = Limits()


def join(seat: Seat | None, limits: Limits = LIMITS) -> AbstractGroup:
    """Connects this process to the others and initializes `jax.distributed`.

    Call this before anything starts a jax backend. If the processes differ in code,
    versions or devices, all of them end here with an error that says how they differ.

    Args:
        seat: From `find_seat`; None means a run of one process.

    Raises:
        JoinError: The coordinator cannot be reached or refuses this process, or process
            0 cannot bind its port.
    """
    if seat is None:
        return Alone()
    hub = _open_hub(seat, limits) if seat.index == 0 else None
    wire = _connect(seat, limits)
    group = Joined(wire, hub, index=seat.index, count=seat.count, limits=limits)
    try:
        # No timeout here: the hub ends the run after join_seconds and names the missing
        # processes.
        group.barrier("join", timeout=None)
        group.agree(code_fingerprint())
        host, _, _ = seat.coordinator.rpartition(":")
        start_jax(group, host, limits=limits, local_device_ids=seat.local_device_ids)
        group.agree(device_fingerprint())
    except BaseException as error:
        group.fail(error)
        raise
    return group


def _open_hub(seat: Seat, limits: Limits) -> Hub:
    host, port = seat.address
    try:
        listener = bound_socket(host, port)
        listener.listen(seat.count)
    except OSError as error:
        raise JoinError(
            f"Process 0 cannot listen on port {port} of this host "
            f"({socket.gethostname()}): {error.strerror}. Another program has it, or a "
            "second process 0; choose another port for --coordinator."
        ) from error
    if not seat.is_secret and not is_loopback(host):
        logger.warning(
            "Whoever reaches port %d of this host can end this run. Use a private "
            "network, or set ZINF_SECRET to one text of your choice for all processes.",
            port,
        )
    return Hub(listener, seat.count, limits, seat.token)


def _connect(seat: Seat, limits: Limits) -> Wire:
    """A connection to the hub; retries, as process 0 may start later than this one."""
    deadline = time.monotonic() + limits.join_seconds
    while True:
        try:
            connection = socket.create_connection(seat.address, ATTEMPT_SECONDS)
            connection.settimeout(limits.silence_seconds)
            wire = Wire(connection, max_bytes=MESSAGE_BYTES * seat.count)
            try:
                introduce(seat, wire)
            except BaseException:
                wire.close()
                raise
            return wire
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(_unreachable(seat, limits, error)) from error
            time.sleep(RETRY_SECONDS)


def _unreachable(seat: Seat, limits: Limits, error: OSError) -> str:
    return (
        f"Process {seat.index} of {seat.count} could not reach the coordinator "
        f"{seat.coordinator} ({seat.launcher}) within {limits.join_seconds:g} s: "
        f"{error}. It must be an address of the host where process 0 runs, with a port "
        "that no firewall closes; see the output of process 0, or allow more time with "
        "--join-timeout."
    )
