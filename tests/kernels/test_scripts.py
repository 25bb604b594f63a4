"""The report and the benchmark of kernels run from end to end without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zinf_kernels.absent_gpu import GPUS, why_not

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr + asked.stdout
    return asked.stdout


def rows_of(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_report_names_an_implementation_for_every_op_and_gpu(tmp_path):
    check_the_report(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.gpu_compiler
def test_the_report_says_what_the_compiler_made_of_each_kernel(tmp_path):
    check_the_report(tmp_path)


def check_the_report(tmp_path: Path) -> None:
    """Where the compiler is, it compiles them: here for one GPU, to save time."""
    gpus = GPUS if why_not() else ["H200"]
    path = tmp_path / "report.json"
    text = run("bench/kernel_report.py", "--json", str(path), "--gpu", *gpus)
    rows = rows_of(path)
    ops = {row["op"] for row in rows}
    assert ops >= {"quantize", "dequantize", "matmul", "cross_entropy"}
    for op in ops:
        chosen = {row["gpu"] for row in rows if row["op"] == op and row["is_chosen"]}
        kernels = {
            row["gpu"]
            for row in rows
            if row["op"] == op and row["implementation"] == "mosaic_gpu"
        }
        assert chosen == {*gpus} and kernels == {*gpus} & {"H100", "H200"}
    for row in rows:
        is_kernel = row["implementation"] == "mosaic_gpu"
        assert row["gpu"] in ("H100", "H200") or not is_kernel
        if why_not():
            assert row["not_compiled"] == why_not() and why_not() in text
        else:
            assert row["temporary_bytes"] >= 0
            assert ("kernels" in row) == is_kernel
        for kernel in row.get("kernels", ()):
            assert 0 < kernel["registers"] <= 255
            assert kernel["spill_stores_bytes"] == kernel["spill_loads_bytes"] == 0
            # What a block may have on Hopper; jax before 0.11 does not say.
            assert (kernel.get("shared_bytes") or 1) <= 227 << 10


@pytest.mark.slow
def test_the_benchmark_times_whatever_can_run_beside_its_floor(tmp_path):
    path = tmp_path / "bench.json"
    run("bench/bench_kernels.py", "--dry-run", "--rounds", "2", "--output", str(path))
    made = rows_of(path)
    assert made["device"] and made["rounds"] == 2
    timed = [row for row in made["rows"] if "seconds" in row]
    left_out = [row for row in made["rows"] if "not_run" in row]
    assert {row["op"] for row in timed} == {row["op"] for row in made["rows"]}
    assert {row["implementation"] for row in left_out} == {"mosaic_gpu"}
    for row in timed:
        assert len(row["all_seconds"]) == 2 and row["floor_seconds"] > 0
        # Of bfloat16 at most, and zero for XLA's own.
        assert row["deviation"] <= 2 * 2.0**-8
    assert {row["implementation"] for row in timed} == {"xla", "reference"}


def test_no_case_is_begun_after_the_time_is_up(tmp_path):
    path = tmp_path / "bench.json"
    given = "--dry-run", "--most-seconds", "0", "--output", str(path)
    text = run("bench/bench_kernels.py", *given)
    rows = rows_of(path)["rows"]
    assert len(rows) > 3 and {row["not_run"] for row in rows} == {"after 0 s"}
    assert text.count("after 0 s") == len(rows)


@pytest.mark.slow
def test_the_loss_is_planned_and_runs_in_a_twentieth_of_the_plain_forms_memory(
    tmp_path,
):
    path, sizes = tmp_path / "memory.json", ("1024", "262144", "16")
    names = ("--tokens", "--vocab", "--dim")
    given = [word for pair in zip(names, sizes, strict=True) for word in pair]
    run("reports/logits_memory.py", *given, "--step", "--json", str(path))
    *compiled, plan, in_blocks, ledger = rows_of(path)
    assert compiled and all(row["share"] < 1 for row in compiled)
    # The plain loss, which zinf divides by itself; there is a gradient per block.
    assert in_blocks["share"] <= 0.1
    for row in (plan, ledger):
        assert row["plain_bytes"] >= 4 * 1024 * 262144
        assert row["fused_bytes"] <= 0.05 * row["plain_bytes"]
    assert ledger["fused_bytes"] <= plan["fused_bytes"]
