"""The actor that runs the function in one process of an attempt."""

import contextlib
import io
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ray

from zinf.core.process.compile_cache import MIN_COMPILE_SECONDS
from zinf.core.process.malloc import tune_malloc
from zinf.distributed import AbstractGroup, Limits
from zinf.distributed.fingerprint import code_fingerprint, device_fingerprint
from zinf.distributed.jax_service import start_jax
from zinf.ray.group import RayGroup, failure_of
from zinf.ray.record import Cause, Outcome

# Exit code of a worker whose grace time was over: as if SIGTERM had ended it.
TERMINATED = 128 + signal.SIGTERM
# Network file systems show a new file to other hosts within this time.
VISIBLE_SECONDS = 10.0
# Compiled programs are kept if compiling took longer than this.


@dataclass(frozen=True, slots=True)
class Post:
    """The arguments of a worker, besides the function that it runs.

    Attributes:
        folder: the working directory, that of the driver.
        storage: a folder that all hosts share, or None.
        compiled: a folder for compiled programs, or None.
    """

    attempt: int
    index: int
    count: int
    limits: Limits
    folder: Path
    storage: Path | None
    compiled: Path | None
    preemption_grace_s: float


class Worker:
    """Runs the function once; its process ends with the attempt."""

    def run(self, post: Post, board: Any, function: Callable[[RayGroup], Any]):
        group = RayGroup(
            board,
            attempt=post.attempt,
            index=post.index,
            count=post.count,
            limits=post.limits,
        )
        group.join()
        tune_malloc()  # The process is ours.
        _leave_on_sigterm(group, post.preemption_grace_s)
        try:
            with _told(group), group:
                _prepare(post, group)
                return Outcome(Cause.DONE, function(group))
        except KeyboardInterrupt:
            return Outcome(group.asked or Cause.INTERRUPTED)
        except BaseException as error:
            return Outcome(Cause.FAILED, failure=failure_of(error, group.last_said))
        finally:
            group.flush()


WorkerActor = ray.remote(max_restarts=0)(Worker)


def _prepare(post: Post, group: RayGroup) -> None:
    """Connect the workers' jax, after a look whether they are alike."""
    try:
        os.chdir(post.folder)
    except OSError as error:
        raise ValueError(
            f"The folder {post.folder}, in which the run was started, cannot be used "
            f"on host {socket.gethostname()}: {error.strerror}. Start from a folder "
            "that all hosts have, as paths of the config are relative to it."
        ) from error
    group.agree(code_fingerprint())
    if post.storage is not None:
        check_is_shared(post.storage, group)
    if post.compiled is not None:
        jax.config.update("jax_compilation_cache_dir", str(post.compiled))
        jax.config.update(
            "jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS
        )
    if group.count > 1:
        host = group.broadcast("host of jax", ray.util.get_node_ip_address())
        start_jax(group, host, limits=post.limits)
    group.agree(device_fingerprint())
    group.say("joined")


def check_is_shared(storage: Path, group: AbstractGroup) -> None:
    """Raise ValueError on all workers unless all of them see one folder."""
    # A new name, as a file of an earlier run may be left on any host.
    token = group.broadcast("name of a file", secrets.token_hex(8))
    mark = storage / f".shared-{token}"
    if group.is_first:
        storage.mkdir(parents=True, exist_ok=True)
        mark.write_text("zinf asks here whether all hosts see this file\n")
    group.barrier("a file is in the shared folder")
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (is_there := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    seen = group.gather("shared folder", [is_there, socket.gethostname()])
    if group.is_first:
        mark.unlink(missing_ok=True)
    blind = [f"worker {i} ({host})" for i, (sees, host) in enumerate(seen) if not sees]
    if blind:
        raise ValueError(
            f"{storage} is not one folder on all hosts: worker 0 ({seen[0][1]}) wrote "
            f"a file there that {', '.join(blind)} cannot see. Checkpoints must be on "
            "storage that all hosts share; set run.output to a folder there."
        )


def _leave_on_sigterm(group: RayGroup, grace_seconds: float) -> None:
    """Let SIGTERM ask this worker to save and end, and end it after the grace time."""
    read, write = os.pipe()
    if sys.platform != "win32":  # Windows lacks the call, and sends no SIGTERM.
        os.set_blocking(write, False)
    # Python runs a handler when its main thread runs Python, which may be long after
    # the signal if that is inside a collective. It writes to this pipe at once.
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def leave() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        group.asked = Cause.PREEMPTED
        time.sleep(grace_seconds)
        os._exit(TERMINATED)

    threading.Thread(target=leave, name="zinf-sigterm", daemon=True).start()


class Lines(io.TextIOBase):
    """A stream whose whole lines the driver prints."""

    def __init__(self, group: RayGroup, prefix: str = "") -> None:
        self._group, self._prefix, self._rest = group, prefix, ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._group.tell(self._prefix + line)
        return len(text)


@contextlib.contextmanager
def _told(group: RayGroup) -> Generator[None, None, None]:
    """Send Python's output to the driver: worker 0's as it is, others' with a name."""
    prefix = "" if group.is_first else f"[worker {group.index}] "
    out, err = Lines(group, prefix), Lines(group, prefix)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
