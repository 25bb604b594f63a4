"""Extracts the text of JSON lines and parquet, once, to a plain file.

In these formats a piece from the middle cannot be read without its surroundings. The
plain file can be read at any position. The extraction holds only a few rows in memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zinf.core.text.json_text import from_json
from zinf.data.digest import file_digest
from zinf.data.files import Kind
from zinf.data.tokens import SEPARATOR
from zinf.data.unfinished import unfinished

# Number of parquet rows in memory at a time.
BATCH_ROWS = 1024


def extracted(
    path: Path,
    kind: Kind,
    *,
    field: str,
    cache: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """A file with the text of all rows of `path`; a zero byte follows each text.

    The file is in the folder `cache`, by the content of `path`: other content has
    another file, also if its size and time are the same.

    Args:
        field: the name of the text in each row.
        say: called with a line of text when the file is made.

    Raises:
        ValueError: A row is damaged, or has no text named `field`; or pyarrow is
            missing.
        OSError: The file cannot be written.
    """
    state = [file_digest(path), kind, field]
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    result = cache / f"{path.stem}-{digest}.text"
    if result.exists():
        return result
    say(f"data: the text of {path} is written to {result}, once")
    rows = _json_rows(path, field) if kind is Kind.JSON_LINES else _rows(path, field)
    # Several processes of a host may extract the same file at the same time, so each
    # writes in its own folder.
    with unfinished(result) as partial:
        with (partial / result.name).open("wb") as stream:
            for text in rows:
                stream.write(text.encode("utf-8", "surrogatepass"))
                stream.write(bytes([SEPARATOR]))
        (partial / result.name).replace(result)
    return result


def json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Each line that is not blank, as JSON, and where it is, for messages.

    Raises:
        ValueError: a line is no JSON.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield from_json(line), where
            except ValueError as error:
                raise ValueError(f"{where}: no JSON: {error}") from None


def parquet_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of a parquet file as JSON would have it, and where it is, for messages.

    Fields that are null are left out, at any depth: a column of structs has them all.

    Raises:
        ValueError: the file is damaged, or pyarrow is missing.
    """
    pa, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield _without_null(row), f"{path}, row {number}"
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file, or is damaged: {error}") from None


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return list(map(_without_null, value)) if isinstance(value, list) else value


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"To read {path}, install pyarrow: pip install 'zinf[parquet]'."
        ) from None
    return pa, parquet


def _json_rows(path: Path, field: str) -> Iterator[str]:
    for row, where in json_lines(path):
        yield _text(row, field, where)


def _text(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else row
    if isinstance(text, str):
        return text
    if isinstance(row, dict):
        names = ", ".join(repr(k) for k, v in row.items() if isinstance(v, str))
        found = f"It has text in {names or 'no field'}. Name that in data.field."
    else:
        found = "A line must be a text, or an object with a text in it."
    raise ValueError(f"{where}: there is no text in {field!r}. {found}")


def _is_text(pa: Any, kind: Any) -> bool:
    """Whether a column of a type has texts, also as numbers of a list of texts.

    That is how pandas writes categories.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _rows(path: Path, field: str) -> Iterator[str]:
    pa, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            texts = [column.name for column in schema if _is_text(pa, column.type)]
            if field not in texts:
                raise ValueError(
                    f"{path} has no column {field!r} of text, only "
                    f"{', '.join(map(repr, texts)) or 'other columns'}. Name a column "
                    "of text in data.field."
                )
            number = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    if not value.is_valid:
                        raise ValueError(f"{path}, row {number}: {field!r} is null.")
                    yield value.as_py()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file, or is damaged: {error}") from None
