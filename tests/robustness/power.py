"""A power cut, simulated: what was synced is there, and of the rest whatever is worst.

`Recorder` looks at some folders after every call that may change files. Its `after`
gives the files as they may be if the power goes right after the nth change:

* STRICT: only what was synced: content of files, and entries of folders.
* EAGER: every entry of a folder is there at once, but content that was not synced is
  not: files are empty, as they are on file systems that write names before content.
* TORN: as EAGER, and what was not synced is garbage of the right length.
* mixed, by a seed: of every folder, some of the unsynced changes of entries, in order.

A file is what it is by its inode, so a hard link and a rename are what they are.
"""

import builtins
import io
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from zinf.core.memory.nvme.system import System

STRICT, EAGER, TORN = "strict", "eager", "torn"
CALLS = "open mkdir rename replace link unlink remove rmdir fsync fdatasync".split()
SYNCS = (os.fsync, os.fdatasync)
REAL_OPEN = os.open

Inode = int


class Event(NamedTuple):
    """A change.

    Attributes:
        kind: "entry" (of a folder, set or removed), "dirty" or "synced" (content),
            "folder" (its entries are synced) or "folder made".
        place: the folder and the name of an entry.
    """

    kind: str
    inode: Inode
    place: tuple[Inode, str] = (0, "")
    content: bytes = b""


@dataclass
class Files:
    """Folders and the content of files, by inode."""

    entries: dict[Inode, dict[str, Inode]] = field(default_factory=dict)
    contents: dict[Inode, bytes] = field(default_factory=dict)

    def apply(self, entry: Event) -> None:
        folder, name = entry.place
        entries = self.entries.setdefault(folder, {})
        if entry.inode:
            entries[name] = entry.inode
        else:
            entries.pop(name, None)

    def write(self, folder: Inode, path: Path) -> None:
        """Make what a folder has, at `path`."""
        path.mkdir()
        for name, inode in self.entries[folder].items():
            if inode in self.entries:
                self.write(inode, path / name)
            else:
                (path / name).write_bytes(self.contents.get(inode, b""))


class Recorder:
    """Attributes:
    events: every change, in order.
    """

    def __init__(self, *roots: Path) -> None:
        self.roots = [os.path.realpath(root) for root in roots]
        self.events: list[Event] = []
        self._lock = threading.RLock()
        # The system uses the numbers of what is gone again; these are never.
        self._ids: dict[int, Inode] = {}
        self._next = count(1)
        self._entries: dict[tuple[Inode, str], Inode] = {}
        self._contents: dict[Inode, bytes] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watches all calls of this process, of any thread."""
        patched = {name: partial(self._watched, getattr(os, name)) for name in CALLS}
        opened = partial(self._watched, builtins.open)
        system = replace(
            System(),
            open=patched["open"],
            replace=patched["replace"],
            unlink=patched["unlink"],
            sync=patched["fdatasync"],
            pwritev=partial(self._watched, os.pwritev),
        )
        with (
            mock.patch.multiple(os, **patched),
            mock.patch.object(builtins, "open", opened),
            mock.patch.object(io, "open", opened),
            mock.patch("zinf.core.memory.nvme.drive.System", lambda: system),
        ):
            yield

    def after(self, num_events: int, how: str, seed: int = 0) -> Files:
        """The files if the power goes after so many events."""
        drawn = random.Random(seed)
        now, kept = Files(), Files()
        unsynced: dict[Inode, list[Event]] = {}
        for event in self.events[:num_events]:
            match event.kind:
                case "folder made":
                    now.entries.setdefault(event.inode, {})
                    kept.entries.setdefault(event.inode, {})
                case "entry":
                    now.apply(event)
                    unsynced.setdefault(event.place[0], []).append(event)
                case "folder":
                    for late in unsynced.pop(event.inode, []):
                        kept.apply(late)
                case "dirty":
                    now.contents[event.inode] = event.content
                case "synced":
                    now.contents[event.inode] = event.content
                    kept.contents[event.inode] = event.content
        if how == "mixed":
            for changes in unsynced.values():
                for late in changes[: drawn.randint(0, len(changes))]:
                    kept.apply(late)
        elif how != STRICT:
            kept.entries = now.entries
        if how == TORN:
            for inode, content in now.contents.items():
                if kept.contents.get(inode) != content:
                    kept.contents[inode] = drawn.randbytes(len(content))
        return kept

    def root(self, path: Path) -> Inode:
        return self._ids[os.lstat(path).st_ino]

    def _watched(
        self, real: Callable[..., Any], target: Any, *args: Any, **kw: Any
    ) -> Any:
        """A call of `real`, and what it changed."""
        with self._lock:
            result = real(target, *args, **kw)
            self._note_entries()
            file = target if isinstance(target, int) else result
            if file is not None:
                number = file if isinstance(file, int) else file.fileno()
                inode = self._ids.get(os.fstat(number).st_ino)
                if inode is not None:
                    self._note_file(number, inode, is_synced=real in SYNCS)
            return result

    def _note_entries(self) -> None:
        entries: dict[tuple[Inode, str], Inode] = {}
        alive: dict[int, Inode] = {}
        for root in filter(os.path.isdir, self.roots):
            self._note(root, alive)
            for folder, folders, files in os.walk(root):
                for name in (*folders, *files):
                    path = os.path.join(folder, name)
                    place = alive[os.lstat(folder).st_ino], name
                    try:
                        inode = entries[place] = self._note(path, alive)
                    except FileNotFoundError:
                        continue  # Moved meanwhile, by a call that is not watched.
                    if self._entries.get(place) != inode and not os.path.islink(path):
                        number = REAL_OPEN(path, os.O_RDONLY)
                        self._note_file(number, inode, is_synced=False)
                        os.close(number)
        changes = [(p, n) for p, n in entries.items() if self._entries.get(p) != n]
        changes += [(place, 0) for place in self._entries if place not in entries]
        self.events += [Event("entry", inode, place) for place, inode in changes]
        self._entries, self._ids = entries, alive

    def _note(self, path: str, alive: dict[int, Inode]) -> Inode:
        """What is at `path`, which may be new there."""
        found = os.lstat(path)
        inode = alive.get(found.st_ino) or self._ids.get(found.st_ino)
        if inode is None:
            inode = next(self._next)
            if stat.S_ISDIR(found.st_mode):
                self.events.append(Event("folder made", inode))
        alive[found.st_ino] = inode
        return inode

    def _note_file(self, number: int, inode: Inode, *, is_synced: bool) -> None:
        """The content of an open file, or a folder that is synced."""
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            self.events += [Event("folder", inode)] * is_synced
            return
        again = REAL_OPEN(f"/proc/self/fd/{number}", os.O_RDONLY)
        content = os.pread(again, found.st_size, 0)
        os.close(again)
        if is_synced or self._contents.get(inode) != content:
            kind = "synced" if is_synced else "dirty"
            self.events.append(Event(kind, inode, content=content))
        self._contents[inode] = content
