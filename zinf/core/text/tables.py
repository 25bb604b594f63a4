"""Tables as lines of text, and in HTML for notebooks and the pages of `zinf report`."""

import re
from collections.abc import Iterable, Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as lines, with the columns of these indices aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(
    rows: Iterable[Sequence[str]],
    head: Sequence[str] = (),
    *,
    numbers: Sequence[int] = (),
    code: bool = False,
) -> str:
    """An HTML table of plain texts.

    Args:
        numbers: indices of the columns that are aligned right.
        code: show cells as code. On a narrow screen a line may break after a dot,
            slash, underscore or comma.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        shown = [_code(cell) if code else escape(cell) for cell in row]
        sides = ["right" if i in numbers else "left" for i in range(len(row))]
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>'
            for cell, side in zip(shown, sides, strict=True)
        )

    first = f"<tr>{cells(head, 'th')}</tr>" if head else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div style="overflow-x:auto"><table>{first}{body}</table></div>'


def _code(text: str) -> str:
    breakable = re.sub(r"([._/,])", r"\1<wbr>", escape(text))
    return f"<code>{breakable}</code>"
