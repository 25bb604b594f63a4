"""The file of --output of a command: whose it is, and what it has already."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from zinf.cli.changes import Changed, check_changed, told
from zinf.core.memory.lock_file import lock_beside, locked
from zinf.core.text.complaint import naming
from zinf.core.text.json_text import from_json
from zinf.distributed import AbstractGroup, Alone

ALONE = Alone()
SETTINGS = ".settings.json"
DONE = "lines that are done"
# How files of NumPy's format begin, and the bytes of their headers here.
MAGIC, HEADER_BYTES = np.lib.format.magic(1, 0), 128


def check_output(output: Path, source: Path, what: str) -> None:
    """Refuse an output that is the file that is read, or no file.

    Args:
        what: what the file that is read is, such as "the file of prompts".

    Raises:
        ValueError: see above; nothing is changed.
    """
    if not output.exists():
        return
    if output.samefile(source):
        raise ValueError(
            f"--output names {what}, {source}, which is left as it is. "
            "Name another file."
        )
    if not output.is_file():
        raise ValueError(f"--output must be a file, and {output} is none.")


class AbstractForm(ABC):
    """How an output holds the answer to each line of an input, one after another.

    Attributes:
        noun: what an answer is, such as "completion".
        count: how many lines the input has.
    """

    noun: str
    count: int

    @abstractmethod
    def found(self, output: Path) -> tuple[int, int]:
        """Number of answers that an output has, and their bytes; changes nothing.

        A last one that was cut short, in a write of this command, does not count.

        Raises:
            ValueError: the output has something else.
        """

    @abstractmethod
    def written(self, number: int, answer: Mapping[str, Any]) -> bytes:
        """The bytes to append for an answer; the first answer is number 0."""


class JsonLines(AbstractForm):
    """Each line of the input with its answer as further columns.

    Args:
        columns: the names of the answer to each line, in order.

    Raises:
        ValueError: a line has such a column already.
    """

    def __init__(
        self,
        lines: Sequence[Mapping[str, Any]],
        columns: Sequence[tuple[str, ...]],
        noun: str,
    ) -> None:
        self.lines, self.columns, self.noun = lines, columns, noun
        self.count = len(lines)

    def check(self) -> None:
        """Refuse lines that have a column of the answer already."""
        for number, (line, names) in enumerate(
            zip(self.lines, self.columns, strict=True)
        ):
            for name in names:
                if name in line:
                    raise ValueError(
                        f"Line {number + 1} of the input has a column {name!r}, which "
                        "the output has for the answer. Name it otherwise."
                    )

    def found(self, output: Path) -> tuple[int, int]:
        content = output.read_bytes()
        num_bytes = content.rfind(b"\n") + 1
        left = content[num_bytes:]
        texts = [line for line in content[:num_bytes].split(b"\n") if line.strip()]
        found = [
            self._loaded(text, output, number) for number, text in enumerate(texts)
        ]
        for number, line in enumerate(found):
            is_known = number < self.count and isinstance(line, dict)
            names = self.columns[number] if is_known else ()
            answer = {name: line.get(name) for name in names}
            if not is_known or line != {**self.lines[number], **answer}:
                raise self._foreign(output, number)
        if left:
            begins = self._beginning(len(found)) if len(found) < self.count else b""
            if not (begins and (left.startswith(begins) or begins.startswith(left))):
                raise self._foreign(output, len(found))
        return len(found), num_bytes

    def written(self, number: int, answer: Mapping[str, Any]) -> bytes:
        full = {**self.lines[number], **answer}
        return json.dumps(full, ensure_ascii=False).encode() + b"\n"

    def _beginning(self, number: int) -> bytes:
        """The bytes of a line of the output up to the value of its answer."""
        mark = uuid4().hex
        line = self.written(number, {self.columns[number][0]: mark})
        return line.partition(f'"{mark}'.encode())[0]

    def _loaded(self, text: bytes, output: Path, number: int) -> Any:
        try:
            return from_json(text)
        except ValueError:
            raise self._foreign(output, number) from None

    def _foreign(self, output: Path, number: int) -> ValueError:
        return ValueError(
            f"{output}, line {number + 1}: it is no {self.noun} of line {number + 1} "
            "of the input. The file is left as it is. Name another output, or delete "
            "it."
        )


class Vectors(AbstractForm):
    """A float32 array in NumPy's format, with a row for each line.

    The file says from its beginning how many rows it will have, so NumPy refuses one
    that is not complete.
    """

    noun = "vector"

    def __init__(self, count: int) -> None:
        self.count = count

    def found(self, output: Path) -> tuple[int, int]:
        size, is_begun = output.stat().st_size, _record_of(output).exists()
        with output.open("rb") as file:
            if size < HEADER_BYTES and (is_begun or not size):
                if MAGIC.startswith(file.read(len(MAGIC))):
                    return 0, 0
                raise self._foreign(output)
            try:
                np.lib.format.read_magic(file)
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            except ValueError:
                raise self._foreign(output) from None
            begins = file.tell()
        is_own = len(shape) == 2 and shape[0] == self.count and not is_fortran
        if not is_own or dtype != np.float32 or not is_begun:
            raise self._foreign(output)
        row = 4 * shape[1]
        done = min((size - begins) // row, self.count)
        # Without a row the beginning is written again.
        return done, begins + done * row if done else 0

    def written(self, number: int, answer: Mapping[str, Any]) -> bytes:
        (vector,) = answer.values()
        content = np.asarray(vector, "<f4")
        if number:
            return content.tobytes()
        begins = BytesIO()
        shape = (self.count, len(content))
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(begins, header)
        return begins.getvalue() + content.tobytes()

    def _foreign(self, output: Path) -> ValueError:
        return ValueError(
            f"{output} is no array of {self.count:,} vectors that zinf embed began. "
            "The file is left as it is. Name another output, or delete it."
        )


@dataclass(frozen=True)
class Resumed:
    """An output that is this command's own, and what it has.

    Attributes:
        done: how many answers it has.
        num_bytes: of them.
        changed: settings that are others than those of before; None: unknown.
        is_written: whether this process writes it.
    """

    output: Path
    form: AbstractForm
    settings: Mapping[str, Any]
    done: int
    num_bytes: int
    changed: Changed | None
    is_written: bool = True

    @contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
        """A function that writes the next answers; they are on the drive on return."""
        if not self.is_written:
            yield lambda answers: None
            return
        number = self.done
        with naming(self.output), self.output.open("ab") as stream:
            record_settings(self.output, self.settings, self.changed, self.done)
            stream.truncate(self.num_bytes)

            def append(answers: Sequence[Mapping[str, Any]]) -> None:
                nonlocal number
                for answer in answers:
                    stream.write(self.form.written(number, answer))
                    number += 1
                stream.flush()
                os.fsync(stream.fileno())

            yield append


@contextmanager
def resumed(
    output: Path,
    form: AbstractForm,
    settings: Mapping[str, Any],
    allowed: Sequence[str],
    say: Callable[[str], None],
    group: AbstractGroup = ALONE,
) -> Iterator[Resumed]:
    """What an output has already; in the `with` block no other command writes to it.

    Args:
        settings: what the answers depend on.
        allowed: settings that may be others than before.
        say: told of what is there.
        group: the processes of the command, of which the first one writes.

    Raises:
        ValueError: the output has other content, which is left as it is; or its answers
            were made with other settings than now, which `allowed` does not name.
        StorageError: another command writes to the output.
    """
    if not group.is_first:
        done = group.broadcast(DONE, None)
        yield Resumed(output, form, settings, done, 0, {}, is_written=False)
        return
    # The same file has one lock by all its names.
    beside = {output: lock_beside(output.resolve())}
    with locked(beside, change="name another --output"):
        done, num_bytes = form.found(output) if output.exists() else (0, 0)
        check_record(output)
        changed = check_settings(output, settings, allowed) if done else {}
        if done:
            say(f"{output} has {done:,} of {form.count:,} lines already.")
        if done < form.count:
            if changed is None:
                say(f"What they were made with is not recorded beside {output}.")
            if changed:
                say(f"The rest is made with other settings: {told(changed)}.")
        group.broadcast(DONE, done)
        yield Resumed(output, form, settings, done, num_bytes, changed)


def check_settings(
    output: Path, settings: Mapping[str, Any], allowed: Sequence[str]
) -> Changed | None:
    """Compare settings with those that the lines of an output were made with.

    Returns the changes; None if there is no record, as beside files of older versions.

    Raises:
        ValueError: a setting differs that is not allowed to.
    """
    path = _record_of(output)
    if not path.exists():
        return None
    return check_changed(
        _read(path)["settings"],
        settings,
        allowed,
        what=f"the lines that {output} has",
        instead="name another output",
    )


def record_settings(
    output: Path, settings: Mapping[str, Any], changed: Changed | None, done: int
) -> None:
    """Write the settings beside the output, with what changed after how many lines."""
    path = _record_of(output)
    changes = _read(path)["changes"] if done and path.exists() else []
    if changed:
        changes = [*changes, {"after_lines": done, "changed": changed}]
    about = {"written_by": "zinf", "settings": settings, "changes": changes}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


def check_record(output: Path) -> None:
    """Refuse a file that has the name of the record and is none."""
    path = _record_of(output)
    if path.exists():
        _read(path)


def _record_of(output: Path) -> Path:
    return output.with_name(f"{output.name}{SETTINGS}")


def _read(path: Path) -> dict[str, Any]:
    try:
        about = from_json(path.read_text("utf-8"))
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("written_by") != "zinf":
        raise ValueError(
            f"{path} is where zinf records the settings of the output, and it "
            "is another file, which is left as it is. Name another output."
        )
    return about
