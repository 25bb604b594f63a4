"""Images in records: where they are, and in which places of a conversation.

A record has `messages` (or `prompt` and `completion`, lists of messages) and `images`,
as in TRL. A message has text, or parts of the types text and image; an image part takes
the next of `images`, or has its own. `<image>` in a text is an image part too.
"""

import base64
import binascii
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from zinf.hf.records import (
    CONVERSATIONS,
    as_parts,
    given_images,
    has_images,
    is_image,
    messages_of,
    parts_of,
    standard,
)

MARK = "<image>"
# What an image part may have its own image below.
OWN = ("image", "path", "base64", "url")
# No path of a file is written so.
DATA_URL = "data:"
REMOTE = ("http://", "https://")
FORMS = "a path, base64, or an object with bytes or path"


def in_parts(line: Any, where: str) -> tuple[Any, list[Any]]:
    """A record whose messages have parts alone, and its images in order.

    If no place is named, all images come first in what the user says first.

    Raises:
        ValueError: there are more or fewer images than places for them.
    """
    given, line = given_images(line), standard(line, where, has_template=True)
    if not isinstance(line, Mapping):
        return line, []
    found = {n: x for n, x in line.items() if n not in ("images", "image")}
    texts = (text for m in messages_of(found) for text in _texts(m))
    is_placed = has_images(found) or any(MARK in text for text in texts)
    images: list[Any] = []
    unplaced = list(given)
    for name in CONVERSATIONS:
        if isinstance(found.get(name), list):
            found[name] = [_plain(m, unplaced, images, where) for m in found[name]]
    if unplaced and not is_placed:
        _put_first(found, len(unplaced), where)
        images, unplaced = unplaced, []
    if unplaced:
        raise ValueError(
            f"{where}: images has {len(given)} entries, and the messages have places "
            f"for {len(given) - len(unplaced)}. Give as many parts of the type image."
        )
    return found, images


def sources_of(line: Any) -> list[Any]:
    """All images that a record names, without regard to their places."""
    parts = (part for message in messages_of(line) for part in parts_of(message))
    return [*given_images(line), *(x for p in parts if is_image(p) for x in _own(p))]


def _own(part: Mapping[str, Any]) -> list[Any]:
    """The image that a part of the type image has itself; empty if it has none."""
    if isinstance(part.get("image_url"), Mapping):
        return [part["image_url"].get("url")]
    return [part[key] for key in OWN if part.get(key) is not None]


def _plain(message: Any, unplaced: list[Any], images: list[Any], where: str) -> Any:
    """The message in parts; its images are appended to `images`.

    Args:
        unplaced: the images of the record that no part had before; parts take them.
    """
    message = as_parts(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts: list[Any] = []
    for part in (
        x for whole in parts_of(message) for x in _apart(whole, bool(unplaced))
    ):
        if not is_image(part):
            parts.append(part)
            continue
        own = _own(part)
        if not own and not unplaced:
            raise ValueError(
                f"{where}: the messages have a part of the type image, and no image is "
                "left for it. Give images in the order of their parts."
            )
        images.append(own[0] if own else unplaced.pop(0))
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _texts(message: Any) -> list[str]:
    """The texts of a message."""
    if not isinstance(message, Mapping):
        return []
    texts = [
        part.get("text") for part in parts_of(message) if isinstance(part, Mapping)
    ]
    return [x for x in (message.get("content"), *texts) if isinstance(x, str)]


def _apart(part: Any, has_images: bool) -> list[Any]:
    """A part of a message, or the parts into which `MARK` divides its text."""
    text = part.get("text") if isinstance(part, Mapping) else None
    if not has_images or not isinstance(text, str) or MARK not in text:
        return [part]
    first, *rest = ({"type": "text", "text": x} for x in text.split(MARK))
    parts = [first]
    for text_part in rest:
        parts += [{"type": "image"}, text_part]
    return [x for x in parts if x.get("text") != ""]


def _put_first(line: dict[str, Any], count: int, where: str) -> None:
    for message in messages_of(line):
        if isinstance(message, Mapping) and message.get("role") == "user":
            places = [{"type": "image"}] * count
            assert isinstance(message, dict), "it was made here"
            message["content"] = [*places, *parts_of(message)]
            return
    raise ValueError(
        f"{where}: images has {count} entries, and no message is of a user. Images "
        "need a conversation in messages, or in prompt and completion."
    )


def content_of(source: Any, folder: Path | None, where: str) -> bytes:
    """The bytes of an image file, as they are.

    Args:
        source: a path, from `folder` on; base64, with or without `data:...;base64,`; an
            object with bytes or a path, as datasets write it; or an image of PIL.

    Raises:
        ValueError: it is nothing of this, or cannot be read.
    """
    if isinstance(source, Image.Image):
        written = BytesIO()
        _upright(source).save(written, "PNG")
        return written.getvalue()
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith(REMOTE):
        raise ValueError(
            f"{where}: the image {source!r:.60} is elsewhere, and zinf downloads none. "
            "Name a file."
        )
    if isinstance(source, str) and source.startswith(DATA_URL):
        return _from_base64(source.partition(",")[2], where)
    path = path_of(source, folder)
    if path is not None:
        return path.read_bytes()
    if isinstance(source, str) and len(source) > 100:
        return _from_base64(source, where)
    raise ValueError(
        f"{where}: there is no image {source!r:.60}"
        f"{'' if folder is None else f' in {folder}'}. An image is {FORMS}."
    )


def path_of(source: Any, folder: Path | None) -> Path | None:
    """The file that a source names, from `folder` on; None if it is none."""
    if isinstance(source, Mapping) and not source.get("bytes"):
        source = source.get("path")
    if not isinstance(source, str | Path) or not source:
        return None
    try:
        path = Path(source).expanduser()
        found = path if folder is None else folder / path
        return found if found.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None  # No name of a file: too long, or with a zero.


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            f"{where}: the image {text!r:.40} ... is no base64, and no file. An image "
            f"is {FORMS}."
        ) from None


def opened(content: bytes, where: str) -> Image.Image:
    """The image in the bytes of a file, in red, green and blue.

    Raises:
        ValueError: PIL cannot read it.
    """
    try:
        with Image.open(BytesIO(content)) as image:
            return _upright(image)
    except UnidentifiedImageError:
        reason = "its form is unknown"
    except Exception as error:  # Of any kind, as the files are anybody's.
        reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"{where}: the image cannot be read ({len(content):,} bytes; {reason}). Repair "
        "it, or leave the line out."
    )


def _upright(image: Image.Image) -> Image.Image:
    """The image in red, green and blue, turned as its EXIF tag of orientation says.

    Cameras store what the sensor saw. `load_image` of transformers turns it too.
    """
    return ImageOps.exif_transpose(image).convert("RGB")
