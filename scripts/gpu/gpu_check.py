"""Checks a GPU machine in under eight minutes: numbers, links, training, drive.

    python scripts/gpu/gpu_check.py [--folder DIR] [--output FILE] [--minutes 7.7]
    python scripts/gpu/gpu_check.py --dry-run      (tiny sizes, on the CPU backend)

Prints a table and writes all rows as JSON. What would be lost most comes first: whether
the losses and gradients of each execution are those of plain JAX, then rates, then
training. Each section runs in its own process with a time limit, so a section that
fails or hangs does not affect the others. A failure is a row with its trace; a figure
that cannot be measured has a row with the reason. Exits with 1 if a section failed.

What a machine needs: jax, flax, optax, tensorstore, orbax-checkpoint, numba, numpy,
xxhash, pydantic (with pydantic-core, annotated-types, typing-inspection), typer, rich,
tqdm and pyyaml, and this folder of the repository beside `zinf/`; not grain, plotly,
tensorboardX, torch or transformers. Without pydantic, zinf cannot read a config:
sections that import it are skipped and name what is missing. Carry its wheels, and put
them on PYTHONPATH.

The section "largest" begins with the first model whose state (16 bytes per parameter
with gradients) plain JAX cannot hold on the device, and doubles its layers as long as
time is left. Plain JAX then tries each of these models, to show that it runs out of
memory.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_environment import memory_bytes
from gpu_report import LINKS, Result, given, summary, table
from gpu_rows import GIB, Rows, Setting, Skipped

ROOT = Path(__file__).resolve().parents[2]
# Sections in the order in which they run: module and function, time limit in seconds,
# and the case if one function serves several sections.
SECTIONS = {
    "environment": ("gpu_environment", "run", 40, ""),
    "right": ("gpu_right", "run", 120, ""),
    "offloaded": ("gpu_right", "run", 120, "offloaded"),
    "attention": ("gpu_attention", "run", 60, ""),
    "links": ("gpu_links", "run", 60, ""),
    "host": ("gpu_host", "run_adam", 40, ""),
    "drive": ("gpu_host", "run_drive", 30, ""),
    "train-plain": ("gpu_train", "run", 60, "plain"),
    "train-host": ("gpu_train", "run", 90, "host"),
    "largest": ("gpu_train", "run", 300, "fill"),
    "train-nvme": ("gpu_train", "run", 120, "nvme"),
    "overlap": ("gpu_overlap", "run", 50, ""),
    "pinned": ("gpu_pinned", "run", 60, ""),
    "registered": ("gpu_registered", "run", 45, ""),
}
TRAIN_LAYERS, DRY_LAYERS = 20, 2
# A section is told to end this long before its process is killed.
GRACE_SECONDS = 5
LEAST_SECONDS = 10
# For the section "largest": lower bound of plain JAX's bytes per parameter (master,
# moments, copy, gradient), and number of parameters of a layer and of the embedding.
PLAIN_BYTES = 16
LAYER_NUMEL, EMBEDDING_NUMEL = 12 * 5120**2, 32768 * 5120
# Double again only if this many times the last round's time is left: a doubled model
# takes about twice as long, and plain JAX needs some time too.
NEXT_TIMES = 2.5
# By default XLA takes three quarters of the device, too little for the largest model.
# Sections that measure links allocate memory as they need it.
ALL_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
# A dry run compiles much and computes little.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
AS_NEEDED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def main() -> int:
    options = _parse()
    began = time.monotonic()
    results: list[Result] = []
    folder = tempfile.mkdtemp(prefix="zinf-gpu-check-", dir=options.folder)
    try:
        for result in _run_all(options, folder, began, results):
            results.append(result)
            print(table(result), flush=True)
            _write(options, time.monotonic() - began, results)
    finally:
        shutil.rmtree(folder)
    print(summary(results))
    print(f"{options.output} has all rows; {time.monotonic() - began:.0f} s in all")
    return int(any(result.status == "failed" for result in results))


def _write(options: argparse.Namespace, seconds: float, results: list[Result]) -> None:
    found = {
        "command": sys.argv,
        "is_dry": options.dry_run,
        "seconds": seconds,
        "sections": [vars(result) for result in results],
    }
    options.output.write_text(json.dumps(found, indent=1) + "\n")


def _run_all(
    options: argparse.Namespace, folder: str, began: float, results: list[Result]
) -> Iterator[Result]:
    ends = began + options.minutes * 60
    blank = Setting(
        section="",
        case="",
        num_layers=DRY_LAYERS if options.dry_run else TRAIN_LAYERS,
        is_dry=options.dry_run,
        seconds=0.0,
        folder=folder,
        ram_bytes=int(options.ram_gib * GIB) if options.ram_gib else memory_bytes(),
        given={},
    )
    settings = [
        replace(blank, section=name, case=case)
        for name, (_, _, _, case) in SECTIONS.items()
        if name in options.sections or name == "environment"
    ]
    if options.dry_run:
        # All sections in one process, to save time: a dry run measures nothing, so it
        # needs no time limit per section.
        yield from run_process(settings, dict.fromkeys(LINKS, 1.0), ends)
        return
    for setting in settings:
        if setting.section == "largest":
            yield from _run_largest(setting, ends, results)
        else:
            yield from run_process([setting], given(results), ends)


def _run_largest(
    setting: Setting, ends: float, results: list[Result]
) -> Iterator[Result]:
    """Doubles the layers as long as zinf can train them and time is left."""
    memory = next((r.find("device memory") for r in results), None)
    if not memory:
        reason = "no GPU: the section environment found no device memory"
        yield Result(setting.section, setting.case, 0, "skipped", reason)
        return
    layers = 1
    while (layers * LAYER_NUMEL + EMBEDDING_NUMEL) * PLAIN_BYTES < memory * GIB:
        layers *= 2
    while True:
        began = time.monotonic()
        for case in (setting.case, "plain"):
            task = replace(setting, case=case, num_layers=layers)
            (result,) = run_process([task], given(results), ends)
            yield result
            if result.status != "ok":
                return
        if ends - time.monotonic() < NEXT_TIMES * (time.monotonic() - began):
            return
        layers *= 2


# Processes.


def run_process(
    settings: list[Setting], rates: dict[str, float], ends: float
) -> list[Result]:
    """Runs sections in one new process, which is killed at their time limit.

    Rows that were reported until then are kept. A section has failed if it raised, or
    if its process crashed or exceeded the time limit of the section.
    """
    results = [Result(s.section, s.case, s.num_layers) for s in settings]
    own_limit = sum(SECTIONS[s.section][2] for s in settings)
    limit = min(own_limit, ends - time.monotonic())
    if limit < LEAST_SECONDS:
        reason = "no time left in --minutes"
        return [replace(r, status="skipped", reason=reason) for r in results]
    seconds = limit - GRACE_SECONDS
    tasks = [replace(s, seconds=seconds, given=rates).to_json() for s in settings]
    with tempfile.TemporaryDirectory() as place:
        rows, log = Path(place) / "rows", Path(place) / "log"
        rows.touch()
        command = [sys.executable, __file__, "--tasks", str(rows), *tasks]
        began = time.monotonic()
        code = _run_command(command, log, limit, _environment(settings[0]))
        taken = time.monotonic() - began
        lines = [json.loads(x) for x in rows.read_text().splitlines()]
        tail = log.read_text(errors="replace")[-2000:]
    _fill(results, lines)
    for result in results:
        if not result.seconds:  # the section did not report its end
            result.seconds = taken
            why = "was stopped at its limit" if code is None else f"ended with {code}"
            result.reason = f"the process {why} after {taken:.0f} s; {tail}"
            if code is None and limit < own_limit:
                result.status = "stopped"  # no failure: the time of --minutes was over
    return results


def _fill(results: list[Result], lines: list[dict[str, Any]]) -> None:
    """Assigns rows to sections; a process writes them in the order of its sections."""
    waiting = iter(results)
    result = next(waiting)
    for line in lines:
        if "end" in line:
            result.status, result.reason = line["end"], line["reason"]
            result.seconds = line["seconds"]
            result = next(waiting, result)
        else:
            result.rows.append(line)


def _run_command(
    command: list[str], log: Path, limit: float, environment: dict[str, str]
) -> int | None:
    """Runs a command; returns its exit code, None if it was killed at the limit."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Kills processes that the command may have left; they are in its group.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _environment(setting: Setting) -> dict[str, str]:
    environment = os.environ | ALL_MEMORY | ({} if setting.case else AS_NEEDED)
    if setting.is_dry:
        # A compilation cache, as the training sections share most executables.
        cache = os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", f"{setting.folder}/compiled"
        )
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"}
    # The section "host" imports bench_adam.py.
    ours = [str(ROOT), str(ROOT / "scripts" / "bench")]
    path = [*ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(path)}


def run_tasks(file: Path, tasks: list[str]) -> None:
    """Runs sections, in the process of `run_process`; appends each row to the file."""
    with file.open("a") as output:
        for text in tasks:
            setting = Setting.from_json(text)
            began = time.monotonic()
            rows = Rows(setting.section, output, began + setting.seconds)
            module, name, _, _ = SECTIONS[setting.section]
            status, reason = "ok", ""
            try:
                function: Callable[..., None] = getattr(import_module(module), name)
                function(setting, rows)
            except Skipped as skipped:
                status, reason = "skipped", str(skipped)
            except Exception as error:
                status, reason = "failed", rows.fail(error)
            rows.end(status, reason, time.monotonic() - began)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, no GPU")
    parser.add_argument("--folder", help="on the drive to use (a temporary folder)")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=7.7, help="for all sections")
    parser.add_argument(
        "--ram-gib", type=float, help="memory to use, if the kernel does not know all"
    )
    parser.add_argument(
        "--sections", nargs="+", default=[*SECTIONS], choices=[*SECTIONS]
    )
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tasks"]:
        run_tasks(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
