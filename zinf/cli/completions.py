"""The file of `zinf generate --output`: whose it is, and what it has already."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from zinf.cli.changes import Changed, check_changed
from zinf.core.text.json_text import from_json

SETTINGS = ".settings.json"


def check_output(output: Path, prompts: Path) -> None:
    """Refuse an output that is the file of prompts, or no file.

    Raises:
        ValueError: see above; nothing is changed.
    """
    if not output.exists():
        return
    if output.samefile(prompts):
        raise ValueError(
            f"--output names the file of prompts, {prompts}, which is left as it is. "
            "Name another file."
        )
    if not output.is_file():
        raise ValueError(f"--output must be a file, and {output} is none.")


def complete_lines(output: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many lines of completions the output has, and their bytes; it only looks.

    A last line that was cut short, in a write of this command, does not count.

    Raises:
        ValueError: the output has a line that is not the prompt's of that number, or an
            end that is not the beginning of one.
    """
    if not output.exists():
        return 0, 0
    content = output.read_bytes()
    num_bytes = content.rfind(b"\n") + 1
    left = content[num_bytes:]
    texts = [line for line in content[:num_bytes].split(b"\n") if line.strip()]
    found = [_loaded(text, output, number) for number, text in enumerate(texts)]
    for number, line in enumerate(found):
        is_known = number < len(lines) and isinstance(line, dict)
        if not is_known or line != {
            **lines[number],
            "completion": line.get("completion"),
        }:
            raise _foreign(output, number)
    if left:
        begins = _beginning(lines[len(found)]) if len(found) < len(lines) else b""
        if not (begins and (left.startswith(begins) or begins.startswith(left))):
            raise _foreign(output, len(found))
    return len(found), num_bytes


def full_line(line: Mapping[str, Any], text: str) -> bytes:
    """A line of the output: that of the prompt with its completion."""
    full = {**line, "completion": text}
    return json.dumps(full, ensure_ascii=False).encode() + b"\n"


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
            f"{path} is where zinf generate records the settings of its output, and it "
            "is another file, which is left as it is. Name another output."
        )
    return about


def _loaded(text: bytes, output: Path, number: int) -> Any:
    try:
        return from_json(text)
    except ValueError:
        raise _foreign(output, number) from None


def _beginning(line: Mapping[str, Any]) -> bytes:
    """The bytes of the line of a prompt up to the text of its completion."""
    mark = uuid4().hex
    return full_line(line, mark).partition(mark.encode())[0]


def _foreign(output: Path, number: int) -> ValueError:
    return ValueError(
        f"{output}, line {number + 1}: it is no completion of line {number + 1} of the "
        "prompts. The file is left as it is. Name another output, or delete it."
    )
