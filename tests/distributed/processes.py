"""Runs of several real processes, each with a hard limit."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 2
# A process that still runs by then hangs, and fails the test.
HARD_LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal) and what it printed."""

    code: int
    output: str

    @property
    def error(self) -> str:
        """What it says of another's end, after "[process i] error: "."""
        return self.output.partition("] error: ")[2]


@cache
def nursery() -> subprocess.Popen:
    """Ends when this process does, with its standard input."""
    own = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **own},
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def run_members(
    parts: Sequence[str],
    *,
    count: int | None = None,
    ids: Sequence[int] | None = None,
    join_seconds: float = 40.0,
) -> list[Ended]:
    """A process of `member.py` for each part, all at once.

    Args:
        count: Processes that each is told of; as many as there are parts if None.
        ids: Process ids; 0, 1, ... if None.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    told = [count or len(parts)] * len(parts)
    named = zip(told, ids or range(len(parts)), parts, strict=True)
    lines = [[coordinator, *map(str, one), str(join_seconds)] for one in named]
    frozen = [i for i, part in enumerate(parts) if part == "freeze"]
    return run_all("member", lines, never_end=frozen)


def run_all(
    main: str, lines: Sequence[Sequence[str]], *, never_end: Sequence[int] = ()
) -> list[Ended]:
    """A process of `main` (see `nursery.py`) for each line of arguments, all at once.

    Those in `never_end` are killed when the others have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        members = [
            {"argv": list(line), "output": f"{folder}/{number}"}
            for number, line in enumerate(lines)
        ]
        ends = asked(main=main, members=members, never_end=list(never_end))
        texts = [Path(one["output"]).read_text(errors="replace") for one in members]
    killed = {i for i, code in enumerate(ends) if code is None}
    hanging = sorted(killed - set(never_end))
    assert not hanging, f"processes {hanging} hang:\n" + "\n".join(texts)
    return [Ended(code, text) for code, text in zip(ends, texts, strict=True)]


def asked(**request: object) -> list:
    process = nursery()
    limit = {"limit_seconds": HARD_LIMIT_SECONDS}
    print(json.dumps({**request, **limit}), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())
