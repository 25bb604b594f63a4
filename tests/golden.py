"""Golden files: expected text that a person reads in the diff.

`pytest --update-golden` writes them anew. Text that depends on the machine (rates,
seconds, paths) is replaced before it is compared, by the test that knows it.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Golden:
    """Golden files of one folder.

    Attributes:
        folder: where they are, beside the tests that compare with them.
        is_updated: whether they are written anew in place of being compared.
    """

    folder: Path
    is_updated: bool

    def check(self, name: str, text: str) -> None:
        """Fail with a diff unless `text` is what the file holds."""
        path = self.folder / name
        text = text.rstrip("\n") + "\n"
        if self.is_updated:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text == expected:
            return
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(path), "now", lineterm=""
        )
        pytest.fail(
            "\n".join(diff) + "\n\nIf the new text is right: pytest --update-golden",
            pytrace=False,
        )
