"""Files that somebody made up are refused by name, and shown without being obeyed."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import run as zinf
from tests.golden import Golden
from tests.robustness.test_hostile_checkpoints import residents_of
from tests.runs import Runs
from tests.unit.refusals import refusals
from zinf.checkpoint import write_arrays
from zinf.core.program import ArrayId, Role
from zinf.data.array_file import read_array
from zinf.data.extract import json_lines
from zinf.observe.json_lines import JsonLines
from zinf.observe.page import run_page, write_page

# It clears the screen, and sets the title of the window.
ESCAPES = "\x1b[2J\x1b]0;title\x07"
DEEP = "[" * 10**5


def put(content: Any, path: Sequence[Any], value: Any) -> Any:
    """The content with a value at a path, or without what is there (`...`)."""
    *above, last = path
    inside = content
    for key in above:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return content


EVENT = object()  # stands for the number of an instruction's event
# What is written in place of a value of a run folder's files.
RUN_FOLDER = {
    "run.json": [
        (("num_steps",), "many"),
        (("held",), {}),
        (("held", "device", "budget"), 10**400),
        (("predicted_seconds",), 0),
        (("metrics",), None),
        (("a" + ESCAPES,), 1),
    ],
    "metrics.jsonl": [
        (("step",), "one"),
        (("step",), ...),
        (("loss",), ESCAPES),
        (("loss",), [1]),
        (("step_seconds",), None),
        (("device_bytes",), 10**400),
        (("tokens_per_second",), {}),
    ],
    "trace.json": [
        ((EVENT, "ts"), "now"),
        ((EVENT, "args"), []),
        ((EVENT, "args", "bytes"), None),
        ((EVENT, "args", "bytes"), 10**400),
        ((EVENT, "args", "waits for"), 3),
        ((EVENT, "args", "frees"), {"tape": 3}),
    ],
}
WHOLE = {
    "run.json": ["[]", DEEP, "\0"],
    "metrics.jsonl": ["3\n", "{}\n", f"{DEEP}\n", "\0\n"],
    "trace.json": ["3", "[]", DEEP],
}


def test_a_made_up_folder_of_a_run_is_refused_by_file(
    runs: Runs, tmp_path: Path, golden: Golden
) -> None:
    names = ("run.json", "metrics.jsonl", "trace.json")
    sound = {name: (runs.host.output / name).read_text() for name in names}
    events = enumerate(json.loads(sound["trace.json"]))
    number = next(i for i, event in events if "waits for" in event.get("args", {}))
    cases: dict[str, Callable[[], Any]] = {}

    def draw(name: str, text: str) -> str:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each, content in (sound | {name: text}).items():
            (folder / each).write_text(content)
        return run_page(folder)

    for name, changes in RUN_FOLDER.items():
        for path, value in changes:
            # Of metrics, the first line.
            first, end, rest = sound[name].partition("\n")
            if name != "metrics.jsonl":
                first, end, rest = sound[name], "", ""
            label = f"{name} {'.'.join(str(x) for x in path if x != EVENT)}"
            label += f" {value!r:.30}"
            path = [number if key is EVENT else key for key in path]
            text = json.dumps(put(json.loads(first), path, value)) + end + rest
            cases[label] = lambda name=name, text=text: draw(name, text)
    for name, texts in WHOLE.items():
        for text in texts:
            label = f"{name} {text!r:.10}"
            cases[label] = lambda name=name, text=text: draw(name, text)
    found = refusals(cases).replace(str(tmp_path), "FOLDER")
    golden.check("run_folder.txt", found.replace("\x1b", "ESC").replace("\x07", "BEL"))


@pytest.mark.parametrize("step", ['"1"', "[]", "null", DEEP])
def test_metrics_with_text_for_a_step_are_moved_when_a_run_resumes(step, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n')
    writer = JsonLines(path, after_step=1)
    writer.close()
    assert path.read_text() == '{"step": 1}\n'
    assert writer.kept.read_text() == f'{{"step": {step}}}\n'


def test_arrays_that_are_pickled_and_lines_that_are_nested_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object))
    with pytest.raises(ValueError, match=r"a\.npy is no array that zinf wrote: Object"):
        read_array(tmp_path / "a.npy")
    (tmp_path / "a.jsonl").write_text(f"{DEEP}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: no JSON: it is nested"):
        list(json_lines(tmp_path / "a.jsonl"))


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of file sizes")
def test_a_file_beyond_the_limit_of_sizes_is_named(tmp_path: Path) -> None:
    """As under `ulimit -f`; Python ignores the signal that would end the process."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, hard))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_page("x" * 2**11, tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.filename == str(tmp_path / "page.html.new")
    assert not (tmp_path / "page.html").exists()


def test_tables_show_keys_and_names_with_escapes(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(json.dumps({f"{ESCAPES}\nkey": 1}))
    name = ArrayId(Role.PARAM, f"dense/{ESCAPES}")
    write_arrays(tmp_path / "saved", residents_of(name), {"num_steps": 1})
    for arguments in (
        ("config", "check", config),
        ("checkpoint", "ls", tmp_path / "saved", "--arrays"),
    ):
        found = zinf(*arguments, code=None)
        assert r"\x1b[2J\x1b]0;title\x07" in found.stdout, found.output
        assert not {"\x1b", "\x07"} & {*found.stdout, *found.stderr}
    found = zinf("config", "check", config, code=None).stdout.splitlines()
    assert sum(r"\nkey" in line for line in found) == 1
