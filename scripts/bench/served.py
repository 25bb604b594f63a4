"""Contenders that run in processes of their own and take a step when they are asked."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def answer(found: Any) -> None:
    """Prints an answer, in the process that is asked."""
    print(json.dumps({"answer": found}), flush=True)


class Served:
    """A process that answers every line of its stdin with one of `answer`."""

    def __init__(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=env,
        )

    def ask(self) -> Any:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next answer; what else is printed between them is passed over.

        Raises:
            RuntimeError: the process ended instead, say because a module is missing.
        """
        for line in self.process.stdout or ():
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        self.process.wait()
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        raise RuntimeError((lines or ["no message"])[-1])

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()
