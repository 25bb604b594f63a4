import json
import logging
import os
from pathlib import Path

import pytest

from zinf.memory.nvme import index as module
from zinf.memory.nvme.index import Index
from zinf.memory.nvme.root import INDEX
from zinf.program import ArrayId, ArraySpec, Role

SPEC = ArraySpec((2, 3), "bfloat16", 2)
ROWS = ArrayId(Role.GRADIENT, "a/b", rows=(1, 2), microbatch=3)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / INDEX).read_text().splitlines()]


def test_each_array_is_a_line_that_says_what_it_is(tmp_nvme: Path) -> None:
    index = Index(tmp_nvme)
    assert lines(tmp_nvme) == []
    index.add("000001", ROWS, SPEC)
    entry = {"array": str(ROWS), "shape": [2, 3], "dtype": "bfloat16"}
    assert lines(tmp_nvme) == [{"name": "000001", **entry}]
    index.close()


def test_what_is_freed_is_a_line_too(tmp_nvme: Path) -> None:
    index = Index(tmp_nvme)
    index.add("000001", ROWS, SPEC)
    index.remove("000001")
    index.add("000001", ROWS.whole, SPEC)
    assert [line.get("freed", False) for line in lines(tmp_nvme)] == [
        False,
        True,
        False,
    ]
    index.close()


def test_it_is_private_and_begins_anew(tmp_nvme: Path) -> None:
    (tmp_nvme / INDEX).write_text("of an earlier run")
    Index(tmp_nvme).close()
    assert lines(tmp_nvme) == []
    assert (tmp_nvme / INDEX).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_nvme) == [INDEX]


def test_it_does_not_grow_with_the_number_of_steps(
    tmp_nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REWRITE_LINES", 10)
    index = Index(tmp_nvme)
    index.add("kept", ROWS, SPEC)
    for number in range(200):
        index.add(f"{number}", ROWS, SPEC)
        index.remove(f"{number}")
        assert len(lines(tmp_nvme)) <= 10 + 4 * 2 + 1
    said = {}
    for line in lines(tmp_nvme):
        said[line["name"]] = line
    assert [n for n, line in said.items() if not line.get("freed")] == ["kept"]
    index.close()


def test_without_it_everything_goes_on_with_one_warning(
    tmp_nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_nvme / INDEX).mkdir()
    with caplog.at_level(logging.WARNING):
        index = Index(tmp_nvme)
        for number in range(5):
            index.add(f"{number}", ROWS, SPEC)
            index.remove(f"{number}")
        index.close()
    assert [INDEX in record.message for record in caplog.records] == [True]


def test_after_close_nothing_is_written(tmp_nvme: Path) -> None:
    index = Index(tmp_nvme)
    index.close()
    index.add("000001", ROWS, SPEC)
    index.remove("000001")
    index.close()
    assert lines(tmp_nvme) == []
