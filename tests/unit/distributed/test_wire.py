"""Messages arrive whole, in order, and no longer than was agreed."""

import json
import socket
from collections.abc import Iterator

import pytest

from zinf.distributed.wire import READ_BYTES, Closed, Wire

MOST = 2 * READ_BYTES


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, Wire(far, max_bytes=MOST)


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def test_messages_come_in_order_however_they_are_cut(pair):
    near, wire = pair
    messages = [
        {"number": i, "text": "x" * (MOST - 100 if i == 2 else i)} for i in range(4)
    ]
    stream = b"".join(map(line, messages))
    found = []
    for start in range(0, len(stream), 1000):
        near.sendall(stream[start : start + 1000])
        found += wire.receive(0.0)
    while len(found) < len(messages):
        found += wire.receive(30.0)
    assert found == messages


def test_one_message_is_received_and_those_after_it_stay(pair):
    near, wire = pair
    near.sendall(line({"a": 1}) + line({"b": 2}) + line({"c": 3}))
    assert wire.receive_one(30.0) == {"a": 1}
    assert wire.receive_one(30.0) == {"b": 2}
    assert wire.receive(30.0) == [{"c": 3}]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_message_that_is_too_long_is_refused_before_it_is_kept(pair, end):
    near, wire = pair
    near.sendall(b"x" * (MOST + 1) + end)
    with pytest.raises(ValueError, match=f"longer than {MOST:,} bytes"):
        while True:
            wire.receive(30.0)


def test_a_message_to_send_has_a_largest_length(pair):
    _, wire = pair
    with pytest.raises(ValueError, match="takes at most 100"):
        wire.send({"value": "x" * 100}, max_bytes=100)


def test_nothing_within_the_time_is_no_message_or_closed(pair):
    _, wire = pair
    assert wire.receive(0.0) == []
    with pytest.raises(Closed, match="within 0 s"):
        wire.receive_one(0.0)


def test_the_end_of_the_other_side_and_of_this_one_are_closed(pair):
    near, wire = pair
    near.close()
    with pytest.raises(Closed):
        wire.receive(30.0)
    wire.close()
    with pytest.raises(Closed):
        wire.receive(0.0)
