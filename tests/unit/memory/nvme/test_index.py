import json
import logging
import os
from pathlib import Path

from zinf.core.memory.nvme import index as module
from zinf.core.memory.nvme.index import Index
from zinf.core.memory.nvme.root import INDEX
from zinf.core.program import ArrayId, ArraySpec, Role

SPEC = ArraySpec((2, 3), "bfloat16", 2)
ROWS = ArrayId(Role.GRADIENT, "a/b", rows=(1, 2), microbatch=3)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / INDEX).read_text().splitlines()]


def test_each_array_made_or_freed_is_a_line(tmp_nvme):
    (tmp_nvme / INDEX).write_text("of an earlier run")
    index = Index(tmp_nvme)
    assert lines(tmp_nvme) == []
    index.add("000001", ROWS, SPEC)
    index.remove("000001")
    index.add("000001", ROWS.whole, SPEC)
    entry = {"name": "000001", "shape": [2, 3], "dtype": "bfloat16"}
    expected = [
        entry | {"array": str(ROWS)},
        {"name": "000001", "freed": True},
        entry | {"array": str(ROWS.whole)},
    ]
    assert lines(tmp_nvme) == expected
    assert (tmp_nvme / INDEX).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_nvme) == [INDEX]
    index.close()
    index.remove("000001")
    index.close()
    assert lines(tmp_nvme) == expected


def test_it_does_not_grow_with_the_number_of_steps(tmp_nvme, monkeypatch):
    monkeypatch.setattr(module, "REWRITE_LINES", 10)
    index = Index(tmp_nvme)
    index.add("kept", ROWS, SPEC)
    lengths = set()
    for _ in range(50):
        index.add("again", ROWS, SPEC)
        index.remove("again")
        lengths.add(len(lines(tmp_nvme)))
    # One array is left when more than 10 + 4 lines were written: two lines a step.
    assert max(lengths) == 15 and min(lengths) == 1
    last = {line["name"]: line for line in lines(tmp_nvme)}
    assert [n for n, line in last.items() if not line.get("freed")] == ["kept"]
    index.close()


def test_without_it_everything_goes_on_with_one_warning(tmp_nvme, caplog):
    (tmp_nvme / INDEX).mkdir()
    with caplog.at_level(logging.WARNING):
        index = Index(tmp_nvme)
        for number in range(5):
            index.add(f"{number}", ROWS, SPEC)
            index.remove(f"{number}")
        index.close()
    assert [INDEX in record.message for record in caplog.records] == [True]
