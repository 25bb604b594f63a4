"""The report and the benchmark of kernels run from end to end without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zinf_kernels.absent_gpu import why_not

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def rows_of(script: str, output: Path, *arguments: str) -> Any:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments, str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr + asked.stdout
    return json.loads(output.read_text())


def test_the_report_says_what_the_compiler_made_of_each_kernel(tmp_path):
    options = "--gpu", "H200", "--json"
    rows = rows_of("bench/kernel_report.py", tmp_path / "report.json", *options)
    assert {r["op"] for r in rows} >= {"quantize", "matmul", "cross_entropy"}
    for row in rows:
        is_kernel = row["implementation"] == "mosaic_gpu"
        if why_not():
            assert row["not_compiled"] == why_not()
        else:
            assert row["temporary_bytes"] >= 0
            assert ("kernels" in row) == is_kernel
        for kernel in row.get("kernels", ()):
            assert kernel["spill_stores_bytes"] == kernel["spill_loads_bytes"] == 0


def test_the_benchmark_times_whatever_can_run_beside_its_floor(tmp_path):
    options = "--dry-run", "--rounds", "2", "--output"
    made = rows_of("bench/bench_kernels.py", tmp_path / "bench.json", *options)
    timed = [row for row in made["rows"] if "seconds" in row]
    left_out = [row for row in made["rows"] if "not_run" in row]
    assert {row["implementation"] for row in left_out} == {"mosaic_gpu"}
    assert {row["implementation"] for row in timed} == {"xla", "reference"}
    for row in timed:
        assert len(row["all_seconds"]) == 2 and row["floor_seconds"] > 0
        # Of bfloat16 at most, and zero for XLA's own.
        assert row["deviation"] <= 2 * 2.0**-8
