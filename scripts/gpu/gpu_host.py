"""Sections of gpu_check.py that need no GPU: the host's update, and the drive."""

import os
import sys
import time
from pathlib import Path

from bench_adam import Group, race
from gpu_rows import Rows, Setting, imported

NUMEL, DRY_NUMEL = 100_000_000, 1 << 18
ROUNDS, DRY_ROUNDS = 5, 2
CONTENDERS = ("zinf", "optax", "reads")


def run_adam(setting: Setting, rows: Rows) -> None:
    """Elements per second of AdamW on the host, by contender and number of threads.

    The contenders are processes of bench_adam.py and take turns as there.
    """
    numel = DRY_NUMEL if setting.is_dry else NUMEL
    rounds = DRY_ROUNDS if setting.is_dry else ROUNDS
    cases = [("float32", 1)] if setting.is_dry else _cases()
    contenders = CONTENDERS[:1] if setting.is_dry else CONTENDERS
    longest = 0.0
    for precision, threads in cases:
        # Do not start a measurement that may hit the time limit: it would count as
        # failed.
        if rows.seconds_left < 1.5 * longest:
            rows.skip("adam", "no time left", precision=precision, threads=threads)
            continue
        began = time.monotonic()
        group = Group(precision, 1, threads, numel)

        def attempt(group: Group = group) -> None:
            pythons = dict.fromkeys(contenders, sys.executable)
            found = race(group, rounds=rounds, pythons=pythons)
            of = {"precision": group.precision, "threads": group.threads}
            for name, seconds in found["seconds"].items():
                rate = numel / 1e9
                rows.add_rate("adam", rate, seconds, "G elements/s", by=name, **of)
            for name, reason in found["missing"].items():
                rows.skip("adam", reason, by=name, **of)

        rows.attempt("adam", attempt, precision=precision, threads=threads)
        longest = max(longest, time.monotonic() - began)


def _cases() -> list[tuple[str, int]]:
    """Pairs of precision and threads, the most important first: time may run out."""
    cores = len(os.sched_getaffinity(0))
    powers = [2**i for i in range(1, cores.bit_length()) if 2**i < cores]
    counts = [cores, *([1] if cores > 1 else []), *reversed(powers)]
    return [(p, n) for n in counts for p in ("bfloat16", "float32")]


def run_drive(setting: Setting, rows: Rows) -> None:
    """The measurements of `zinf bench io` on the drive."""
    nvme = imported("zinf.core.memory.nvme")
    seconds = 0.0 if setting.is_dry else min(12.0, rows.seconds_left / 2)
    profile, measured = nvme.measure_drive(Path(setting.folder), seconds=seconds)
    of = {"block MiB": profile.block_bytes / 2**20, "threads": profile.num_threads}
    chosen = next(
        row
        for row in measured
        if row.profile.block_bytes == profile.block_bytes
        and row.profile.num_threads == profile.num_threads
    )
    for name in ("reads", "writes", "mixed"):
        rates = [rate / 1e9 for rate in getattr(chosen, name)]
        rows.add_all(name, rates, "GB/s", **of)
