"""Messages between two processes: JSON objects, one a line, over a TCP connection."""

import json
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
READ_BYTES = 1 << 16


class Closed(ConnectionError):
    """The other end is gone."""


class Wire:
    """A connected socket; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # Small messages must not wait for one another.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        """Send all of it, within the socket's timeout.

        Raises:
            Closed: The other end is gone, or takes nothing.
        """
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self.connection.sendall(line)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, seconds: float) -> list[Message]:
        """The messages that have come; none if none comes within `seconds`.

        Raises:
            Closed: The other end is gone.
            ValueError: What came is no message: the other end is not zinf.
        """
        if not self._incoming.poll(seconds * 1000):
            return []
        try:
            data = self.connection.recv(READ_BYTES)
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("end of stream")
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is not an object")
        return messages

    def close(self) -> None:
        self.connection.close()
