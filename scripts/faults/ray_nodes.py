"""A Ray cluster whose nodes are network namespaces of this machine; needs root.

Each node has an address of its own at the end of a veth pair, and can be cut off.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

SUBNET = "10.77.{}"  # the rest is taken from the process id
PORT = 6399
RAY = Path(sys.executable).with_name("ray")
OBJECT_STORE_BYTES = 80 << 20
START_SECONDS = 120.0
# The head takes a node that does not answer for dead after about 5 s.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


def why_not() -> str:
    """Why there can be no such cluster here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    name = f"zinf{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Nodes:
    """A head without room for workers, and `count` nodes for one worker each."""

    def __init__(self, count: int) -> None:
        self.subnet = SUBNET.format(os.getpid() % 250)
        self.tag = f"zf{os.getpid() % 100000}"
        self.count = count
        self.head = f"{self.subnet}.1"
        self.address = f"{self.head}:{PORT}"
        self._running: dict[int, subprocess.Popen] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self.tag, "type", "bridge")
            _ip("address", "add", f"{self.head}/24", "dev", self.tag)
            _ip("link", "set", self.tag, "up")
            self._running[-1] = self._start(
                ["--head", f"--port={PORT}", "--include-dashboard=false"], self.head, 0
            )
            self._wait_for_port()
            for index in range(self.count):
                self._connect(index)
                self.start(index)
            threading.Thread(target=self._watch, daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for index in sorted(self._running, reverse=True):
                self._kill(index)
        for index in range(self.count):
            shutil.rmtree(self._etc(index), ignore_errors=True)
            subprocess.run(["ip", "netns", "del", self.name(index)], check=False)
        subprocess.run(["ip", "link", "del", self.tag], check=False)

    def name(self, index: int) -> str:
        return f"{self.tag}n{index}"

    def start(self, index: int) -> None:
        """Start a node, or start it again."""
        inside = ["ip", "netns", "exec", self.name(index)]
        rest = [f"--address={self.address}"]
        self._running[index] = self._start(rest, self._own(index), 1, inside)

    def cut(self, index: int) -> None:
        """Cut a node's network: packets to and from it are lost."""
        _ip("link", "set", self.name(index), "down")

    def heal(self, index: int) -> None:
        """Connect a node anew; its Ray was given up by the head, so it starts anew."""
        with self._lock:
            if index in self._running:  # else all has ended
                self._kill(index)
                _ip("link", "set", self.name(index), "up")
                self.start(index)

    def of(self, pid: int) -> int | None:
        """The node that a process runs on."""
        roots = {node.pid: index for index, node in self._running.items()}
        return next((roots[p] for p in ancestors(pid) if p in roots), None)

    def _watch(self) -> None:
        """Start nodes again that ended, as on a busy machine they may in starting."""
        while True:
            time.sleep(2)
            with self._lock:
                if not self._running:
                    return
                for index, node in list(self._running.items()):
                    if index >= 0 and node.poll() is not None:
                        self.start(index)

    def _own(self, index: int) -> str:
        return f"{self.subnet}.{index + 2}"

    def _etc(self, index: int) -> Path:
        return Path("/etc/netns") / self.name(index)

    def _connect(self, index: int) -> None:
        name = self.name(index)
        # gloo listens at the address of the host's name.
        self._etc(index).mkdir(parents=True)
        hosts = f"127.0.0.1 localhost\n{self._own(index)} {socket.gethostname()}\n"
        (self._etc(index) / "hosts").write_text(hosts)
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "eth0", "netns", name)
        _ip("link", "set", name, "master", self.tag, "up")
        _ip("-n", name, "address", "add", f"{self._own(index)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")

    def _start(
        self, rest: Sequence[str], own: str, num_cpus: int, inside: Sequence[str] = ()
    ) -> subprocess.Popen:
        command = [
            *inside,
            *(
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--block",
                "--disable-usage-stats",
            ),
            *(f"--node-ip-address={own}", f"--num-cpus={num_cpus}"),
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *rest,
        ]
        environment = {**os.environ, **HEALTH}
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection((self.head, PORT), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _kill(self, index: int) -> None:
        """End a node, with all processes that it started."""
        node = self._running.pop(index)
        table = parents()
        for pid in [p for p in table if node.pid in ancestors(p, table)]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        node.wait()


def ancestors(pid: int, table: Mapping[int, int] | None = None) -> Iterator[int]:
    """A process, its parent, and so on."""
    table = parents() if table is None else table
    while pid in table:
        yield pid
        pid = table[pid]


def parents() -> dict[int, int]:
    """The process id of each process's parent."""
    return {pid: parent for pid, parent, _ in processes()}


def processes() -> Iterator[tuple[int, int, str]]:
    """Process id, that of the parent, and command line of each process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
                command = (folder / "cmdline").read_text()
            except OSError:
                continue  # it has ended
            parent = int(stat.rpartition(")")[2].split()[1])
            yield int(folder.name), parent, command


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
