"""Process 0's end of every connection: it exchanges values and detects lost processes.

The first failure becomes the verdict: one text that the hub sends to every process,
which then ends. The hub runs in its own thread, so it works while a collective hangs.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from zinf.distributed import verdict
from zinf.distributed.agreement import differences
from zinf.distributed.greeting import GREETING_BYTES, checked, welcome
from zinf.distributed.limits import (
    GRACE_SECONDS,
    GREETING_SECONDS,
    LINGER_SECONDS,
    TOGETHER_SECONDS,
    Limits,
)
from zinf.distributed.peer import Peer
from zinf.distributed.strangers import Strangers
from zinf.distributed.wire import MESSAGE_BYTES, Closed, Message, Wire

logger = logging.getLogger(__name__)


class Hub:
    """Connects the processes of a run in a star, and watches them.

    Args:
        listener: A listening socket, which the hub closes.
        count: Number of processes of the run.
        token: What a process must have.
    """

    def __init__(
        self, listener: socket.socket, count: int, limits: Limits, token: str
    ) -> None:
        self._listener, self._count, self._limits = listener, count, limits
        self._token = token
        self._strangers = Strangers(count)
        self._start = time.monotonic()
        self._peers: dict[int, Peer] = {}
        self._indices: dict[Wire, int] = {}
        self._given: dict[str, dict[int, Any]] = {}
        self._deadlines: dict[str, float] = {}
        self._lost: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._due = float("inf")  # when `_lost` or `_failed` becomes the verdict
        self._verdict: str | None = None
        self._has_left = False
        self._beat_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="zinf-hub", daemon=True).start()

    @property
    def num_strangers(self) -> int:
        """Connections that were dropped because they did not belong to this run."""
        return self._strangers.num_dropped

    def wait(self) -> None:
        """Wait until every other process has left, but not longer than it may take."""
        self._over.wait(LINGER_SECONDS + 1.0)

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._round()
            self._close()
        except BaseException:
            # Without a hub no process would learn of a failure. Ending process 0 ends
            # all, as their connections close.
            traceback.print_exc()
            os._exit(1)
        # Must be the last statement: the process may end as soon as this is set.
        self._over.set()

    def _close(self) -> None:
        self._listener.close()
        for wire in self._strangers.all():
            wire.close()
        self._selector.close()

    def _is_over(self) -> bool:
        others = [peer for index, peer in self._peers.items() if index != 0]
        is_alone = not any(peer.is_connected for peer in others)
        if self._verdict is not None:
            is_complete = len(self._peers) == self._count
            return (is_alone and is_complete) or time.monotonic() > self._due
        return self._has_left and is_alone

    def _round(self) -> None:
        for key, _ in self._selector.select(self._limits.beat_seconds / 4):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.fileno() >= 0:  # not dropped earlier in this round
                self._read(key.data)
        now = time.monotonic()
        self._drop(self._strangers.late(now - GREETING_SECONDS))
        if now - self._beat_at >= self._limits.beat_seconds:
            self._beat_at = now
            said = self._peers[0].said if 0 in self._peers else "nothing"
            self._tell_all({"beat": said})
        if self._verdict is None and not self._has_left:
            self._judge(now)

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError as error:
            # Either the connection has closed already, or this process has too many
            # open files. Dropping all strangers makes room again.
            logger.warning("A connection could not be accepted: %s", error)
            self._drop(self._strangers.all())
            return
        connection.settimeout(self._limits.silence_seconds)
        wire = Wire(connection, max_bytes=GREETING_BYTES)
        self._drop(self._strangers.too_many())
        self._strangers.add(wire, host)
        self._selector.register(wire, selectors.EVENT_READ, wire)

    def _read(self, wire: Wire) -> None:
        try:
            messages = wire.receive_now()
            for message in messages:
                if wire in self._strangers:
                    self._greet(wire, message)
                else:
                    self._hear(wire, message)
        except (Closed, ValueError) as error:
            self._gone(wire, error)

    def _greet(self, wire: Wire, message: Message) -> None:
        """Admit a process that has the token.

        Raises:
            StrangerError: It has another one, or the message is no greeting.
        """
        greeting = checked(message, self._token)
        index, peer = greeting.index, Peer(wire, greeting.host, greeting.pid)
        self._strangers.remove(wire)
        wire.max_bytes = MESSAGE_BYTES
        self._tell(wire, welcome(self._token))
        if self._verdict is not None:
            self._tell(wire, {"end": self._verdict, "failed": []})
        twin = self._peers.get(index)
        if twin is not None:
            self._end(verdict.twins(index, twin, peer), also=wire)
        elif greeting.count != self._count:
            text = verdict.counts(self._count, index, greeting.count)
            self._end(text, also=wire)
        if twin is None:
            self._peers[index], self._indices[wire] = peer, index

    def _hear(self, wire: Wire, message: Message) -> None:
        index = self._indices.get(wire)
        if index is None:
            return
        peer = self._peers[index]
        peer.heard = time.monotonic()
        match message:
            case {"say": text}:
                peer.say(text)
            case {"fail": text}:
                self._failed.setdefault(index, text)
                self._due = min(self._due, time.monotonic() + GRACE_SECONDS)
            case {"give": name, "value": value, "seconds": seconds, "agree": agree}:
                self._give(name, index, value, seconds, agree)

    def _give(
        self, name: str, index: int, value: Any, seconds: float | None, agree: bool
    ) -> None:
        """Keep one process's value of a gather; once all are here, send them to all."""
        given = self._given.setdefault(name, {})
        if seconds is not None:
            self._deadlines.setdefault(name, time.monotonic() + seconds)
        given[index] = value
        if len(given) < self._count:
            return
        values = [given[i] for i in range(self._count)]
        del self._given[name]
        self._deadlines.pop(name, None)
        found = differences(values) if agree else None
        if found is not None:
            self._end(verdict.unlike(found))
            return
        # From here on a closed connection is no loss: processes leave after this reply.
        self._has_left = self._has_left or name == "leave"
        self._tell_all({"name": name, "values": values})

    def _judge(self, now: float) -> None:
        """End the run if a process is missing, silent, lost, failed, absent or hung."""
        limits, peers = self._limits, self._peers
        missing = sorted(set(range(self._count)) - peers.keys())
        if missing and now - self._start > limits.join_seconds:
            known = self._strangers.summary
            self._end(verdict.missing(missing, self._count, limits, known))
        for index, peer in peers.items():
            if now - peer.heard > limits.silence_seconds:
                self._lose(index, f"no sign of life for {limits.silence_seconds:g} s")
        if now > self._due and self._lost:
            self._end(verdict.lost(self._lost, peers, self._count))
        elif now > self._due:
            self._end(verdict.failed(self._failed, peers, self._count))
        for name, deadline in self._deadlines.items():
            if now > deadline:
                absent = sorted(peers.keys() - self._given[name].keys())
                self._end(verdict.absent(absent, name, peers))
        silent = [p for p in peers.values() if now - p.said_at > limits.hang_seconds]
        if silent and not missing:
            self._end(verdict.hung(peers, self._count, limits))

    def _gone(self, wire: Wire, why: Exception) -> None:
        """Close a connection that the other end closed, or on which nonsense came."""
        if wire in self._strangers:
            self._drop([wire], str(why))
            return
        self._selector.unregister(wire)
        wire.close()
        index = self._indices.get(wire)
        if index is None:
            return
        self._peers[index].is_connected = False
        if index in self._failed:  # its error is known, so there is nothing to wait for
            self._due = min(self._due, time.monotonic())
        elif not self._has_left:
            is_end = isinstance(why, Closed)
            how = "its connection closed" if is_end else f"it sent nonsense, {why}"
            self._lose(index, how)

    def _drop(self, wires: Sequence[Wire], why: str = "it did not greet in time"):
        """Refuse and close connections without a valid greeting."""
        for wire in wires:
            self._selector.unregister(wire)
            self._strangers.drop(wire, why)
            self._tell(wire, {"refused": why})
            wire.close()

    def _lose(self, index: int, how: str) -> None:
        if index not in self._lost:
            self._lost[index] = how
            self._due = min(self._due, time.monotonic() + TOGETHER_SECONDS)

    def _end(self, text: str, *, also: Wire | None = None) -> None:
        """Tell every process what ends the run; later calls have no effect."""
        if self._verdict is not None:
            return
        self._verdict = text
        self._due = time.monotonic() + LINGER_SECONDS
        # The process that failed first raises its own error instead of the verdict.
        first = [] if self._lost else list(self._failed)[:1]
        self._tell_all({"end": text, "failed": first})
        if also is not None:
            self._tell(also, {"end": text, "failed": []})

    def _tell_all(self, message: Message) -> None:
        for peer in self._peers.values():
            if peer.is_connected:
                self._tell(peer.wire, message)

    def _tell(self, wire: Wire, message: Message) -> None:
        with contextlib.suppress(Closed):  # reading from the wire detects it too
            wire.send(message)
