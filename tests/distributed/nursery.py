"""Starts groups of processes by forking one that has imported zinf already.

Importing it costs more than all that the tests do. Nothing has started a backend, or a
thread, at the time of the fork. Reads a request a line and answers with a line:

    {"main": one of `MAINS`,
     "members": [{"argv": [...], "output": FILE}, ...],
     "never_end": [INDEX, ...], "limit_seconds": 240.0}
    -> [EXIT_CODE or null if killed here, ...]
"""

import atexit
import json
import os
import signal
import sys
import time
from typing import Any

from tests.distributed import beginning, command, generating, member, training

MAINS = {
    "beginning": beginning.main,
    "command": command.main,
    "generating": generating.main,
    "member": member.main,
    "training": training.main,
}
POLL_SECONDS = 0.02


def born(main: str, argv: list[str], output: str) -> int:
    """Forks a process that runs one of `MAINS`, and returns its id."""
    pid = os.fork()
    if pid:
        return pid
    target = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        MAINS[main](*argv)
    except SystemExit as ended:
        finish(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        finish(1)
    finish(0)
    raise AssertionError("unreachable")


def finish(code: int) -> None:
    """What the interpreter does at its end, in a fork that has no end of its own."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def raised(request: dict[str, Any]) -> list[int | None]:
    """How each process of a group ended."""
    pids = [born(request["main"], **named) for named in request["members"]]
    ended: dict[int, int] = {}
    deadline = time.monotonic() + request["limit_seconds"]
    awaited = set(range(len(pids))) - set(request["never_end"])
    while awaited - ended.keys() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for i in set(range(len(pids))) - ended.keys():
            pid, status = os.waitpid(pids[i], os.WNOHANG)
            if pid:
                ended[i] = os.waitstatus_to_exitcode(status)
    for i in set(range(len(pids))) - ended.keys():
        os.kill(pids[i], signal.SIGKILL)
        os.waitpid(pids[i], 0)
    return [ended.get(i) for i in range(len(pids))]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(raised(json.loads(line))), flush=True)
