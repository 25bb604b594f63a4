"""HTML tables, for notebooks and for the pages of `zinf report`."""

import re
from collections.abc import Iterable, Sequence
from html import escape


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
