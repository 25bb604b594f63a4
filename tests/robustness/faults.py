"""A block layer that notes the calls of the NVMe tier and goes wrong on demand."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import partial
from math import inf
from pathlib import Path
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np

from zinf.core.memory.host.aligned import (
    PAGE_BYTES,
    PAGED_FROM_BYTES,
    address,
    aligned_empty,
)
from zinf.core.memory.nvme import System

SECONDS_TO_WAIT = 60


@dataclass(frozen=True)
class Call:
    """One call of the tier; `go(*arguments)` makes it."""

    name: str
    path: Path
    arguments: tuple[Any, ...]
    go: Callable[..., Any]

    @property
    def offset(self) -> int:
        """Where in the file, for transfers."""
        return self.arguments[2]

    @property
    def memory(self) -> np.ndarray:
        """What is to be moved, for transfers."""
        return self.arguments[1][0]

    @property
    def is_direct(self) -> bool:
        """Whether the file is open with O_DIRECT now, for transfers."""
        return bool(fcntl.fcntl(self.arguments[0], fcntl.F_GETFL) & os.O_DIRECT)

    def move(self, memory: np.ndarray, offset: int) -> int:
        """Make a transfer otherwise than it was asked."""
        descriptor, _, _, *flags = self.arguments
        return self.go(descriptor, [memory], offset, *flags)


Deed = Callable[[Call], Any]
"""What happens instead of a call: returns what that returns, or raises OSError."""


@dataclass(frozen=True)
class Rule:
    """Which calls are done otherwise.

    Args:
        names: of `System`'s fields, separated by spaces.
        path: pattern that the whole path of the file matches.
        first: the number of the first such call that it is about, from 1.
        times: of how many calls from there on.
        when: what else has to hold of a call to be counted.
    """

    names: str
    deed: Deed
    path: str = "*"
    first: int = 1
    times: float = inf
    when: Callable[[Call], bool] = lambda call: True

    def is_about(self, call: Call) -> bool:
        is_named = call.name in self.names.split()
        return is_named and fnmatch(str(call.path), self.path) and self.when(call)


class Transfer(NamedTuple):
    """What a `preadv` or `pwritev` was asked."""

    name: str
    offset: int
    nbytes: int
    address: int
    is_direct: bool
    flags: tuple[int, ...]
    thread: str


class BlockLayer:
    """Makes the calls of `system`, by the first rule that is about each.

    Args:
        real: what makes the calls that no rule is about.

    Attributes:
        transfers: every `preadv` and `pwritev`, in order.
        num_faults: calls inside `broken` that a rule was about.
    """

    def __init__(self, real: System | None = None) -> None:
        self.transfers: list[Transfer] = []
        real = real or System()
        names = [field.name for field in fields(System)]
        self.system = System(
            **{n: partial(self._call, n, getattr(real, n)) for n in names}
        )
        self._rules: list[Rule] = []
        self._counts: list[int] = []
        self._paths: dict[int, Path] = {}
        self._lock = Lock()
        self._is_cached = True
        self.num_faults = 0

    @contextmanager
    def broken(
        self, *rules: Rule, is_cached: bool = False, is_sure: bool = True
    ) -> Iterator[None]:
        """Rules hold in here.

        Args:
            is_cached: whether the page cache may help out.
            is_sure: whether there must be a call that a rule is about.
        """
        self.num_faults = 0
        self._rules, self._counts = list(rules), [0] * len(rules)
        self._is_cached = is_cached
        try:
            yield
        finally:
            self._rules, self._is_cached = [], True
        assert self.num_faults or not is_sure, f"no call is one of {rules}"

    def _call(self, name: str, go: Callable[..., Any], *arguments: Any) -> Any:
        call = Call(name, self._path(name, arguments), arguments, go)
        if name == "open_cached" and not self._is_cached:
            return fail(errno.EAGAIN)(call)
        if name == "close":
            self._paths.pop(arguments[0])
        if name in ("preadv", "pwritev"):
            self.transfers.append(_transfer(call))
        result = self._choose(call)(call)
        if name in ("open", "open_cached"):
            self._paths[result] = call.path
        return result

    def _path(self, name: str, arguments: tuple[Any, ...]) -> Path:
        named = arguments[1 if name == "replace" else 0]
        return self._paths[named] if isinstance(named, int) else Path(named)

    def _choose(self, call: Call) -> Deed:
        with self._lock:
            for index, rule in enumerate(self._rules):
                if not rule.is_about(call):
                    continue
                self._counts[index] += 1
                if rule.first <= self._counts[index] < rule.first + rule.times:
                    self.num_faults += 1
                    return rule.deed
        return go_on


def _transfer(call: Call) -> Transfer:
    memory, thread = call.memory, threading.current_thread().name
    flags = tuple(call.arguments[3:])
    where = call.offset, memory.nbytes, address(memory)
    return Transfer(call.name, *where, call.is_direct, flags, thread)


def go_on(call: Call) -> Any:
    return call.go(*call.arguments)


def fail(code: int) -> Deed:
    """Nothing is done, and the error `code` reported."""

    def deed(call: Call) -> Any:
        raise OSError(code, os.strerror(code))

    return deed


def fail_after(code: int) -> Deed:
    """Everything is done, and the error `code` reported nevertheless."""

    def deed(call: Call) -> Any:
        go_on(call)
        fail(code)(call)

    return deed


def move_at_most(nbytes: int) -> Deed:
    """Short transfers. (More is moved than reported, in whole pages for O_DIRECT.)"""

    def deed(call: Call) -> int:
        whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return min(call.move(call.memory[:whole], call.offset), nbytes)

    return deed


def move_nothing(call: Call) -> int:
    return 0


def pretend(call: Call) -> Any:
    """Nothing is done, and success reported."""
    return call.memory.nbytes if call.name == "pwritev" else None


def read_zeros(call: Call) -> int:
    call.memory[:] = 0
    return call.memory.nbytes


def misplace(call: Call) -> Any:
    """Moves what lies half of it, or a page, further on, and reports success."""
    distance = min(PAGE_BYTES, call.memory.nbytes // 2)
    call.move(call.memory, call.offset + distance)
    return call.memory.nbytes


def flip_bit(at: int) -> Deed:
    """One bit of byte `at` of what is moved is another."""

    def deed(call: Call) -> int:
        if call.name == "preadv":
            moved = go_on(call)
            call.memory[at] ^= 4
            return moved
        # Of so many bytes, it begins at a page, as O_DIRECT wants it.
        wrong = aligned_empty((PAGED_FROM_BYTES,), np.uint8)[: call.memory.size]
        wrong[:] = call.memory
        wrong[at] ^= 4
        return call.move(wrong, call.offset)

    return deed


def before(function: Callable[[], object]) -> Deed:
    """Something happens just before the call."""

    def deed(call: Call) -> Any:
        function()
        return go_on(call)

    return deed


class Gate:
    """A deed: calls are held from when they come until the gate is opened."""

    def __init__(self) -> None:
        self._is_open = Event()
        self.num_waiting = 0

    def __call__(self, call: Call) -> Any:
        return before(self.hold)(call)

    def hold(self) -> None:
        self.num_waiting += 1
        assert self._is_open.wait(SECONDS_TO_WAIT)

    def open(self) -> None:
        self._is_open.set()

    def wait(self, num_calls: int = 1) -> None:
        """Until so many calls are held."""
        eventually(lambda: self.num_waiting >= num_calls)


def open_buffered(path: Path, flags: int, *mode: int) -> int:
    """`os.open` of a file system that has no O_DIRECT."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no O_DIRECT here")
    return os.open(path, flags, *mode)


def eventually(is_so: Callable[[], Any]) -> None:
    """Wait for what other threads are about to do."""
    deadline = monotonic() + SECONDS_TO_WAIT
    while not is_so():
        assert monotonic() < deadline
        sleep(0.002)


def threads_of(folder: Path) -> list[str]:
    """The threads of the drive that moves the files of `folder`."""
    names = [t.name for t in threading.enumerate()]
    return [n for n in names if n.startswith("nvme") and n.endswith(f" {folder.name}")]


def open_files(folder: Path) -> list[str]:
    """What this process has open under `folder`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found
