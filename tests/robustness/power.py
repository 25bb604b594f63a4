"""A power cut, simulated: what was synced is there, and of the rest whatever is worst.

`Recorder` watches every call that changes files under some folders. `Recorder.after`
gives the files as they may be if the power goes right after the nth of these calls:

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
from typing import Any
from unittest import mock

from zinf.memory.nvme.system import System

STRICT, EAGER, TORN = "strict", "eager", "torn"
WRITES = os.O_WRONLY | os.O_RDWR

Inode = int


@dataclass(frozen=True)
class Event:
    """Attributes:
    kind: "entry" (of a folder, set or removed), "dirty" or "synced" (content), "folder"
        (its entries are synced) or "folder made".
    place: the folder and the name of an entry.
    """

    kind: str
    inode: Inode
    place: tuple[Inode, str] | None = None
    content: bytes = b""


@dataclass
class Files:
    """Folders and the content of files, by inode."""

    entries: dict[Inode, dict[str, Inode]] = field(default_factory=dict)
    contents: dict[Inode, bytes] = field(default_factory=dict)

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
        self._clean: set[Inode] = set()
        # The system uses the numbers of what is gone again; these are never.
        self._ids: dict[int, Inode] = {}
        self._next = count(1)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watches all calls of this process, of any thread."""
        notes = {
            "open": self._open,
            "mkdir": self._mkdir,
            "rename": self._move,
            "replace": self._move,
            "link": self._move,
            "unlink": self._remove,
            "remove": self._remove,
            "rmdir": self._remove,
            "fsync": self._sync,
            "fdatasync": self._sync,
        }
        patched = {
            name: partial(self._watched, note, getattr(os, name))
            for name, note in notes.items()
        }
        opened = partial(self._watched, self._open_text, builtins.open)
        system = replace(
            System(),
            open=patched["open"],
            replace=patched["replace"],
            unlink=patched["unlink"],
            sync=patched["fdatasync"],
            pwritev=partial(self._watched, self._write, os.pwritev),
        )
        with (
            mock.patch.multiple(os, **patched),
            mock.patch.object(builtins, "open", opened),
            mock.patch.object(io, "open", opened),
            mock.patch("zinf.memory.nvme.drive.System", lambda: system),
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
                    assert event.place is not None
                    _apply(now, event)
                    unsynced.setdefault(event.place[0], []).append(event)
                case "folder":
                    for late in unsynced.pop(event.inode, []):
                        _apply(kept, late)
                case "dirty":
                    now.contents[event.inode] = event.content
                case "synced":
                    now.contents[event.inode] = event.content
                    kept.contents[event.inode] = event.content
        if how == "mixed":
            for changes in unsynced.values():
                for late in changes[: drawn.randint(0, len(changes))]:
                    _apply(kept, late)
        elif how != STRICT:
            kept.entries = now.entries
        if how == TORN:
            for inode, content in now.contents.items():
                if kept.contents.get(inode) != content:
                    kept.contents[inode] = drawn.randbytes(len(content))
        return kept

    def root(self, path: Path) -> Inode:
        return self._id(str(path))

    def _id(self, path: str) -> Inode:
        number = os.lstat(path).st_ino
        if number not in self._ids:
            self._ids[number] = next(self._next)
        return self._ids[number]

    def _forget(self, status: os.stat_result | None) -> None:
        """What had that status lost a name, perhaps its last."""
        if status and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1):
            self._ids.pop(status.st_ino, None)

    def _watches(self, path: str) -> bool:
        return any(path == r or path.startswith(f"{r}/") for r in self.roots)

    def _set(self, path: str) -> None:
        """An entry is there."""
        parent = os.path.dirname(path)
        if parent in self.roots:  # Which nobody made: there from the beginning.
            self.events.append(Event("folder made", self._id(parent)))
        place = self._id(parent), os.path.basename(path)
        if os.path.isdir(path) and not os.path.islink(path):
            self.events.append(Event("folder made", self._id(path)))
        self.events.append(Event("entry", self._id(path), place))

    def _watched(
        self, note: Callable[..., Any], real: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """A call of `real`, which `note` makes and notes."""
        with self._lock:
            return note(real, *args, **kw)

    def _mkdir(self, real: Callable[..., Any], path: Any, *args: Any, **kw: Any) -> Any:
        where = _absolute(path, kw.get("dir_fd"))
        result = real(path, *args, **kw)
        if self._watches(where):
            self._set(where)
        return result

    def _open(
        self, real: Callable[..., int], path: Any, flags: int, *args: Any, **kw: Any
    ) -> int:
        where = _absolute(path, kw.get("dir_fd"))
        is_new = not os.path.lexists(where)
        result = real(path, flags, *args, **kw)
        if flags & (WRITES | os.O_CREAT) and self._watches(where):
            if is_new:
                self._set(where)
            if flags & os.O_TRUNC or is_new:
                self._dirty(where)
        return result

    def _open_text(
        self,
        real: Callable[..., Any],
        path: Any,
        mode: str = "r",
        *args: Any,
        **kw: Any,
    ) -> Any:
        if isinstance(path, int) or not set(mode) & set("wax+"):
            return real(path, mode, *args, **kw)
        where = _absolute(path, None)
        is_new = not os.path.lexists(where)
        result = real(path, mode, *args, **kw)
        if self._watches(where):
            if is_new:
                self._set(where)
            self._dirty(where)
        return result

    def _move(
        self, real: Callable[..., Any], source: Any, target: Any, **kw: Any
    ) -> None:
        """A rename or a link."""
        old, new = _absolute(source, None), _absolute(target, None)
        # A file that was there before: its content is what it was, and not synced.
        inode = self._id(old)
        if os.path.isfile(old) and inode not in self._clean:
            self._clean.add(inode)
            self._dirty(old)
        gone = os.lstat(new) if os.path.lexists(new) else None
        real(source, target, **kw)
        self._forget(gone)
        if self._watches(new):
            self._set(new)
        if self._watches(old) and not os.path.lexists(old):
            self._unset(old)

    def _remove(
        self, real: Callable[..., Any], path: Any, *args: Any, **kw: Any
    ) -> None:
        where = _absolute(path, kw.get("dir_fd"))
        gone = os.lstat(where)
        real(path, *args, **kw)
        self._forget(gone)
        if self._watches(where):
            self._unset(where)

    def _unset(self, path: str) -> None:
        parent = os.path.dirname(path)
        if os.path.isdir(parent):
            place = self._id(parent), os.path.basename(path)
            self.events.append(Event("entry", 0, place))

    def _sync(self, real: Callable[[int], None], descriptor: int) -> None:
        real(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self.events.append(Event("folder", self._id(path)))
        elif os.path.exists(path):
            self._clean.add(self._id(path))
            self.events.append(self._content("synced", path))

    def _write(self, real: Callable[..., int], descriptor: int, *args: Any) -> int:
        moved = real(descriptor, *args)
        self._dirty(os.readlink(f"/proc/self/fd/{descriptor}"))
        return moved

    def _dirty(self, path: str) -> None:
        if os.path.isfile(path):
            self.events.append(self._content("dirty", path))

    def _content(self, kind: str, path: str) -> Event:
        return Event(kind, self._id(path), content=Path(path).read_bytes())


def _apply(files: Files, event: Event) -> None:
    assert event.place is not None
    folder, name = event.place
    entries = files.entries.setdefault(folder, {})
    if event.inode:
        entries[name] = event.inode
    else:
        entries.pop(name, None)


def _absolute(path: Any, folder: int | None) -> str:
    text = os.fsdecode(path)
    if folder is not None:
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    parent, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(parent), name)
