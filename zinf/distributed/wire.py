"""Messages between two processes: one JSON object per line over a TCP connection."""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from zinf.core.text.json_text import from_json

Message = Mapping[str, Any]
READ_BYTES = 1 << 16
# Largest message of one process. The largest that zinf sends is the config, a few KiB.
MESSAGE_BYTES = 1 << 24


class Closed(ConnectionError):
    """The other end is gone."""


class Wire:
    """A connected socket; any thread may send, one thread receives.

    Attributes:
        max_bytes: largest length of a message that is received.
    """

    def __init__(
        self, connection: socket.socket, *, max_bytes: int = MESSAGE_BYTES
    ) -> None:
        self.connection, self.max_bytes = connection, max_bytes
        # Without TCP_NODELAY a small message waits until the one before it is
        # acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._incoming: selectors.BaseSelector | None = None
        self._buffer = bytearray()
        self._ready: deque[Message] = deque()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message, *, max_bytes: int | None = None) -> None:
        """Send the whole message, within the socket's timeout.

        Raises:
            Closed: The other end is gone, or did not read in time.
            ValueError: The message is longer than `max_bytes`.
        """
        line = json.dumps(message).encode() + b"\n"
        if max_bytes is not None and len(line) > max_bytes:
            raise ValueError(
                f"A message of {len(line):,} bytes was to be sent to process 0, which "
                f"takes at most {max_bytes:,}. Exchange less at once, or large values "
                "through a file that all processes see."
            )
        try:
            with self._sending:
                self.connection.sendall(line)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, seconds: float) -> list[Message]:
        """The messages that have come; empty if none comes within `seconds`.

        Raises:
            Closed: The other end is gone.
            ValueError: The data is no message, so the other end is not zinf.
        """
        if not self._ready and self._waited(seconds):
            self._read()
        return self._taken()

    def receive_now(self) -> list[Message]:
        """The messages that are complete after one read; waits if nothing has come.

        Raises:
            Closed, ValueError: See `receive`.
        """
        self._read()
        return self._taken()

    def _taken(self) -> list[Message]:
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def receive_one(self, seconds: float) -> Message:
        """The next message; those after it are kept for the next call.

        Raises:
            Closed: The other end is gone, or sent nothing within `seconds`.
            ValueError: The data is no message, so the other end is not zinf.
        """
        deadline = time.monotonic() + seconds
        while not self._ready:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Closed(f"nothing came within {seconds:g} s")
            if self._waited(left):
                self._read()
        return self._ready.popleft()

    def _read(self) -> None:
        try:
            data = self.connection.recv(READ_BYTES)
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("end of stream")
        # Search only the new data: searching the whole buffer each time would take
        # quadratic time for a long line.
        end = data.rfind(b"\n")
        if end >= 0:
            lines = (bytes(self._buffer) + data[:end]).split(b"\n")
            self._buffer = bytearray(data[end + 1 :])
            self._ready.extend(map(self._message, lines))
        else:
            self._buffer += data
        if len(self._buffer) > self.max_bytes:
            raise ValueError(self._too_long())

    def close(self) -> None:
        # shutdown wakes a thread that waits in `receive`; close alone does not.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _message(self, line: bytes) -> Message:
        if len(line) > self.max_bytes:
            raise ValueError(self._too_long())
        try:
            message = from_json(line)
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        return message

    def _too_long(self) -> str:
        return f"a message is longer than {self.max_bytes:,} bytes"

    def _waited(self, seconds: float) -> bool:
        """Wait at most `seconds` for data; whether some came."""
        try:
            if self._incoming is None:
                self._incoming = selectors.DefaultSelector()
                self._incoming.register(self.connection, selectors.EVENT_READ)
            is_there = bool(self._incoming.select(seconds))
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error
        if self.connection.fileno() < 0:
            raise Closed("closed here")
        return is_there
