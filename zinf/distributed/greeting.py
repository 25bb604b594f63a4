"""How a process and the hub recognize each other: the first three messages.

    hub      {"zinf": NONCE}
    process  {"greeting": JSON of WHO, with a nonce of its own, "proof": of both}
    hub      {"proof": of the process's nonce}, or {"refused": WHY}

A proof is a keyed digest, under the secret of the run, of a number that the other end
chose. A recorded proof is therefore useless on another connection, and another program
that listens on the port cannot pass for process 0.
"""

import json
import os
import socket
from dataclasses import dataclass

from zinf.core.text.json_text import from_json
from zinf.distributed.limits import GREETING_SECONDS
from zinf.distributed.seat import JoinError, Seat
from zinf.distributed.secret import Secret, nonce
from zinf.distributed.secret_file import read_file
from zinf.distributed.wire import Message, Wire

# Largest size of each of the three messages; a host name has 253 characters at most.
GREETING_BYTES = 4096


class StrangerError(ValueError):
    """The other end is no process of this run; the message says why."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who a process says it is; it has proved that it knows the secret."""

    index: int
    count: int
    host: str
    pid: int
    nonce: str


def hello(number: str) -> Message:
    """The hub's first message; `number` comes from `nonce`."""
    return {"zinf": number}


def checked(message: Message, secret: Secret, number: str) -> Greeting:
    """The greeting in a process's answer to `hello(number)`.

    Raises:
        StrangerError: The message is no greeting, or its proof is wrong.
    """
    match message:
        case {"greeting": str(text), "proof": proof}:
            if not secret.proves(proof, "process", number, text):
                raise StrangerError("it does not know the secret of this run")
        case _:
            raise StrangerError("it did not greet")
    match from_json(text):
        case {
            "index": int(index),
            "count": int(count),
            "host": str(host),
            "pid": int(pid),
            "nonce": str(theirs),
        }:
            return Greeting(index, count, host, pid, theirs)
        case _:
            raise StrangerError("it did not say who it is")


def welcome(secret: Secret, greeting: Greeting) -> Message:
    return {"proof": secret.proof("hub", greeting.nonce)}


def introduce(seat: Seat, wire: Wire, secret: Secret | None) -> None:
    """Tell the hub which process this is, and check that it is the hub of this run.

    Args:
        secret: None means the secret in the file of process 0, which it wrote before
            its first message.

    Raises:
        Closed: The other end closed the connection, or did not answer in time.
        JoinError: The other end is no hub of this run, or refuses this process.
    """
    number = nonce()
    place = {"index": seat.index, "count": seat.count, "nonce": number}
    text = json.dumps({**place, "host": socket.gethostname(), "pid": os.getpid()})
    try:
        match wire.receive_one(GREETING_SECONDS):
            case {"zinf": str(theirs)}:
                pass
            case _:
                raise StrangerError("it did not greet")
        secret = secret or read_file(seat.address[1])
        wire.send({"greeting": text, "proof": secret.proof("process", theirs, text)})
        match wire.receive_one(GREETING_SECONDS):
            case {"proof": proof} if secret.proves(proof, "hub", number):
                return
            case {"refused": str(why)}:
                raise JoinError(_refused(seat, secret, why))
            case _:
                raise StrangerError("it does not know the secret of this run")
    except JoinError:
        raise
    except ValueError as error:
        raise JoinError(
            f"What listens at {seat.coordinator} ({seat.launcher}) is not process 0 of "
            f"this run: {error}. Give all processes the same ZINF_SECRET, or choose "
            "another port for --coordinator."
        ) from error


def _refused(seat: Seat, secret: Secret, why: str) -> str:
    return (
        f"Process 0 at {seat.coordinator} refused process {seat.index} of "
        f"{seat.count}: {why}. Here the processes know one another by {secret.source}. "
        "Give all the same ZINF_SECRET, or none and start all in the same way."
    )
