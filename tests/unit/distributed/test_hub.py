"""Process 0 talks to the processes of its run only, whatever else connects."""

import gc
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.golden import Golden
from zinf.distributed.greeting import GREETING_BYTES, introduce, welcome
from zinf.distributed.hub import Hub
from zinf.distributed.limits import Limits
from zinf.distributed.listen import bound_socket
from zinf.distributed.seat import JoinError, Seat
from zinf.distributed.strangers import MORE
from zinf.distributed.wire import Wire

COUNT = 2
TOKEN, WRONG = "only us", "not us"
# An answer that does not come fails the test by then.
SECONDS = 30.0
ADDRESS = "127.0.0.1"


class Run:
    """A hub, and connections to it."""

    def __init__(self, stack: ExitStack):
        self.stack = stack
        listener = bound_socket(ADDRESS, 0)
        listener.listen()
        self.port = listener.getsockname()[1]
        self.hub = Hub(listener, COUNT, Limits(), TOKEN)

    def connect(self) -> socket.socket:
        made = socket.create_connection((ADDRESS, self.port), SECONDS)
        return self.stack.enter_context(made)

    def process(self, index: int, token: str = TOKEN) -> Wire:
        """A process of the run, or one that says so, after its greeting."""
        wire = Wire(self.connect())
        introduce(seat(self.port, index, token=token), wire)
        return wire

    def end(self, *wires: Wire) -> None:
        for wire in wires:
            give(wire, "leave", None)
        for wire in wires:
            answer(wire, "leave")
            wire.close()
        self.hub.wait()


def seat(port: int, index: int, count: int = COUNT, token: str = TOKEN) -> Seat:
    return Seat("test", f"{ADDRESS}:{port}", count, index, token=token)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def give(wire: Wire, name: str, value: object) -> None:
    wire.send({"give": name, "value": value, "seconds": None, "agree": False})


def answer(wire: Wire, name: str) -> list:
    """What the hub gathered; signs of life before it are passed over."""
    while True:
        match wire.receive_one(SECONDS):
            case {"name": found, "values": values} if found == name:
                return values
            case {"beat": _}:
                pass
            case other:
                raise AssertionError(other)


def dropped(connection: socket.socket) -> bytes:
    """What the hub still says to a connection until it closes it."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass  # closed while more was on its way there
    return b"".join(parts)


def forged(token: object, **changes: object) -> bytes:
    who = {"index": 1, "count": COUNT, "host": "x", "pid": 1} | changes
    return json.dumps({"greeting": who, "token": token}).encode() + b"\n"


STRANGE = {
    "nothing to read": b"\n",
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no text": bytes(range(128, 256)) + b"\n",
    "no object": b"[1, 2]\n",
    "deeply nested": b"[" * (GREETING_BYTES - 1) + b"\n",
    "a large number": b'{"index": ' + b"9" * 4000 + b"}\n",
    "an old greeting": b'{"index": 1, "count": 2, "host": "x", "pid": 1}\n',
    "a token that is no text": forged(3),
    "another token": forged("1" * 64),
    "the token itself": forged(TOKEN),
    "the answer of a hub": forged(welcome(TOKEN)["token"]),
    "no number": forged("", index="1"),
    "an endless line": b"x" * (GREETING_BYTES + 1),
    "a long line": b"x" * (GREETING_BYTES + 1) + b"\n",
}


def test_what_strangers_send_ends_nothing_and_is_counted(run):
    first = run.process(0)
    for number, sent in enumerate(STRANGE.values(), start=1):
        stranger = run.connect()
        stranger.sendall(sent)
        assert b"refused" in dropped(stranger)
        assert run.hub.num_strangers == number
    second = run.process(1)
    for index, wire in enumerate((first, second)):
        give(wire, "value", index)
    assert answer(first, "value") == answer(second, "value") == [0, 1]
    run.end(first, second)
    assert run.hub.num_strangers == len(STRANGE)


def test_connections_that_say_nothing_leave_room_for_the_processes(run):
    silent = [run.connect() for _ in range(3 * MORE)]
    first, second = run.process(0), run.process(1)
    run.end(first, second)
    # Those above the most at once were dropped, the first of them first.
    assert run.hub.num_strangers >= len(silent) + 1 - MORE - COUNT
    assert b"refused" in dropped(silent[0])


@pytest.mark.parametrize("said", [welcome(WRONG), {"welcome": 1}, {}])
def test_a_process_believes_no_hub_without_the_token(said):
    with bound_socket(ADDRESS, 0) as listener, ThreadPoolExecutor(1) as other:
        listener.listen()
        at = listener.getsockname()

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                wire = Wire(connection)
                wire.receive_one(SECONDS)
                wire.send(said)
                dropped(connection)

        pretending = other.submit(pretend)
        with socket.create_connection(at, SECONDS) as connection:
            with pytest.raises(JoinError, match=r"is not process 0 of this run"):
                introduce(seat(at[1], 1), Wire(connection))
        pretending.result()


def end(wire: Wire) -> str:
    """What the hub says that ends the run, without hosts, processes and times."""
    while "end" not in (message := wire.receive_one(SECONDS)):
        pass
    text = re.sub(r"host \S+, pid \d+", "host H, pid P", message["end"])
    return re.sub(r"\d+ s ago", "a while ago", text)


def test_another_token_is_refused_and_told_also_in_the_verdict_on_the_late(run):
    wire = run.process(0)
    with pytest.raises(JoinError, match=r"refused process 1 of 2.*same ZINF_SECRET"):
        run.process(1, WRONG)
    assert run.hub.num_strangers == 1
    # The time is over now, however long the above took.
    run.hub._limits = Limits(join_seconds=0.0)
    text = end(wire)
    assert "Process 1 of 2 did not join" in text
    assert "Process 0 dropped 1 connection" in text


def other_count(run: Run, first: Wire) -> None:
    introduce(seat(run.port, 1, COUNT + 1), Wire(run.connect()))


def unlike(run: Run, first: Wire) -> None:
    for index, wire in enumerate((first, run.process(1))):
        value = {"config": "ab"[index], "seed": 1}
        wire.send({"give": "all", "value": value, "seconds": None, "agree": True})


def absent(run: Run, first: Wire) -> None:
    run.process(1).send({"say": "reading a slow disk"})
    first.send({"give": "meeting", "value": 0, "seconds": 0.1, "agree": False})


def failed(run: Run, first: Wire) -> None:
    run.process(1).send({"fail": "OSError: the drive is full"})


def limited(run: Run, **seconds: float) -> None:
    second = run.process(1)
    second.send({"say": "step 1"})
    second.send({"say": "step 2"})
    while not any(peer.num_words == 2 for peer in list(run.hub._peers.values())):
        time.sleep(0.01)
    run.hub._limits = Limits(**seconds)


ENDS: dict[str, Callable[[Run, Wire], object]] = {
    "two of one id": lambda run, first: [run.process(1) for _ in range(2)],
    "another number": other_count,
    "another config": unlike,
    "absent from a gather": absent,
    "an error": failed,
    "a closed connection": lambda run, first: run.process(1).close(),
    "nonsense": lambda run, first: run.process(1).connection.sendall(b"x\n"),
    "silence": lambda run, first: limited(run, silence_seconds=0.0),
    "no progress": lambda run, first: limited(run, hang_seconds=0.0),
}


# A hub leaves its ends of connections to the end of its process.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_ends_a_run_is_told_in_words_that_name_the_process(golden: Golden):
    lines = []
    for name, act in ENDS.items():
        with ExitStack() as stack:
            run = Run(stack)
            first = run.process(0)
            act(run, first)
            lines.append(f"{name}: {end(first)}")
    del run, first
    # Once for all hubs: it takes seconds beside what other tests hold.
    gc.collect()
    golden.check("verdicts.txt", "\n".join(lines))


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("node001", "::")],
)
def test_an_address_of_this_host_is_listened_on_alone(host, bound):
    if bound == "::" and not socket.has_dualstack_ipv6():
        bound = "0.0.0.0"
    with bound_socket(host, 0) as listener:
        assert listener.getsockname()[0] == bound
