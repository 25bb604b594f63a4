"""The check of a GPU machine runs from end to end where there is none."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "gpu_check.py"
# Right or wrong comes first, then the rates that training is compared with.
SECTIONS = (
    *("environment", "right", "offloaded", "attention", "links", "host", "drive"),
    *("train-plain", "train-host", "largest", "train-nvme", "overlap", "pinned"),
    "registered",
)
# What zinf uses elsewhere, and a rented machine with jax does not have.
ABSENT = ("grain", "plotly", "tensorboardX", "torch", "torchax", "transformers")
ROW = {
    "section": str,
    "name": str,
    "unit": str,
    "note": str,
    "trace": str,
    "of": dict,
    "repeats": int,
    "value": (str, bool, int, float, type(None)),
    "low": (float, type(None)),
    "high": (float, type(None)),
}


def check(folder: Path, *arguments: str, **environment: str) -> tuple[int, dict]:
    output = folder / "found.json"
    command = [sys.executable, SCRIPT, "--dry-run", "--folder", folder]
    done = subprocess.run(
        [*command, "--output", output, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert output.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(output.read_text())


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section_on_a_bare_machine(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')")
    code, found = check(tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 0, [s["reason"] for s in found["sections"]]
    ran = {s["section"]: s["status"] for s in found["sections"]}
    assert [*ran.items()] == [(name, "ok") for name in SECTIONS]
    assert found["is_dry"] is True
    assert found["seconds"] > 0
    sections = {s["section"]: s["rows"] for s in found["sections"]}
    for section, rows in sections.items():
        assert rows, section
        for row in rows:
            assert row.keys() == ROW.keys()
            for name, kinds in ROW.items():
                assert isinstance(row[name], kinds), (name, row)
            assert row["section"] == section
            # What has no value says why.
            assert row["value"] is not None or row["note"].startswith("skipped: ")
    agrees = [r for s in ("right", "offloaded") for r in sections[s]]
    assert [r["of"]["step"] for r in agrees if r["value"] is True] == [
        "fused",
        "streamed from NVMe",
        "offloaded with activations",
    ]
    registered = sections["registered"]
    driver = [r for r in registered if r["of"].get("path") == "driver, registered"]
    assert driver and all(r["note"].startswith("skipped: no GPU") for r in driver)
    expected = {"step", "tokens", "MFU", "bound", "step / bound", "busy"}
    expected |= {"predicted before", "predicted after"}
    for section in ("train-host", "train-nvme", "largest"):
        assert expected <= {row["name"] for row in sections[section]}
    assert sections["train-plain"][-2]["name"] == "out of memory"


@pytest.mark.slow
def test_a_module_that_zinf_lacks_skips_only_what_needs_it(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ImportError('not on this machine')")
    names = "environment", "train-host", "registered"
    code, found = check(tmp_path, "--sections", *names, PYTHONPATH=str(tmp_path))
    assert code == 0
    sections = {s["section"]: s for s in found["sections"]}
    assert sections["train-host"]["status"] == "skipped"
    assert "not on this machine" in sections["train-host"]["reason"]
    assert sections["registered"]["status"] == "ok"


def test_a_process_that_hangs_is_stopped(script: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    code = script._run_command(command, tmp_path / "log", 0.2, dict(os.environ))
    assert code is None


def test_what_was_measured_before_a_crash_is_kept(script: ModuleType) -> None:
    first, second = (script.Result(name, "", 0) for name in ("links", "overlap"))
    end = {"end": "ok", "reason": "", "seconds": 1.0}
    script._fill([first, second], [{"name": "h2d"}, end, {"name": "matmul"}])
    assert (first.status, first.rows) == ("ok", [{"name": "h2d"}])
    assert (second.status, second.rows) == ("failed", [{"name": "matmul"}])


def test_a_failure_is_a_row_with_its_trace(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text("def run(setting, rows): return 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(script.SECTIONS, "drive", ("failing", "run", 30, ""))
    task = script.Setting("drive", "", 2, True, 5.0, str(tmp_path), 1, {})
    script.run_tasks(tmp_path / "rows", [task.to_json()])
    row, end = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["name"] == "failed"
    assert 'failing.py", line 1, in run' in row["trace"]
    assert (end["end"], end["reason"]) == ("failed", row["note"])
    assert row["note"] == "ZeroDivisionError: division by zero"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return import_module("gpu_check")
