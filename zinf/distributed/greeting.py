"""How a process and the hub recognize each other: the first two messages.

    process  {"greeting": WHO, "token": of a process}
    hub      {"token": of the hub}, or {"refused": WHY}

Each shows a digest of the token that all processes of the run have. The token itself
does not cross the network. Who can read the network can repeat a digest: use a private
one, which jax's own services need too.
"""

import hashlib
import hmac
import os
import socket
from dataclasses import dataclass

from zinf.distributed.limits import GREETING_SECONDS
from zinf.distributed.seat import JoinError, Seat
from zinf.distributed.wire import Message, Wire

# Largest size of each of the messages; a host name has 253 characters at most.
GREETING_BYTES = 4096


class StrangerError(ValueError):
    """The other end is no process of this run; the message says why."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who a process says it is; it has shown the token of the run."""

    index: int
    count: int
    host: str
    pid: int


def checked(message: Message, token: str) -> Greeting:
    """The greeting in a process's first message.

    Raises:
        StrangerError: The message is no greeting, or its token is another one.
    """
    match message:
        case {
            "greeting": {
                "index": int(index),
                "count": int(count),
                "host": str(host),
                "pid": int(pid),
            },
            "token": str(shown),
        }:
            if not _is_equal(shown, _digest("process", token)):
                raise StrangerError("it does not have the token of this run")
            return Greeting(index, count, host, pid)
    raise StrangerError("it did not greet")


def welcome(token: str) -> Message:
    return {"token": _digest("hub", token)}


def introduce(seat: Seat, wire: Wire) -> None:
    """Tell the hub which process this is, and check that it is the hub of this run.

    Raises:
        Closed: The other end closed the connection, or did not answer in time.
        JoinError: The other end is no hub of this run, or refuses this process.
    """
    who = {"index": seat.index, "count": seat.count}
    who |= {"host": socket.gethostname(), "pid": os.getpid()}
    wire.send({"greeting": who, "token": _digest("process", seat.token)})
    try:
        answer = wire.receive_one(GREETING_SECONDS)
    except ValueError as error:
        raise JoinError(_no_hub(seat, str(error))) from error
    match answer:
        case {"refused": str(why)}:
            raise JoinError(
                f"Process 0 at {seat.coordinator} refused process {seat.index} of "
                f"{seat.count}: {why}. Give all processes the same ZINF_SECRET, or "
                "none, and start all in the same way."
            )
        case {"token": str(shown)} if _is_equal(shown, _digest("hub", seat.token)):
            return
    raise JoinError(_no_hub(seat, "it does not have the token of this run"))


def _no_hub(seat: Seat, why: str) -> str:
    return (
        f"What listens at {seat.coordinator} ({seat.launcher}) is not process 0 of "
        f"this run: {why}. Give all processes the same ZINF_SECRET, or choose another "
        "port for --coordinator."
    )


def _digest(role: str, token: str) -> str:
    return hashlib.sha256(f"{role} {token}".encode()).hexdigest()


def _is_equal(shown: str, expected: str) -> bool:
    """Takes as long wherever they differ, so that nobody can guess digit by digit."""
    return hmac.compare_digest(shown.encode(), expected.encode())
