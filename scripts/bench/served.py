"""Contenders that run in their own processes and take a step on request."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def answer(found: Any) -> None:
    """Prints an answer; called in the process of the contender."""
    print(json.dumps({"answer": found}), flush=True)


def answer_texts(model: Any, prompts: Any, count: int) -> None:
    """Generates by `transformers` for every line of stdin.

    Answers with the seconds and the `count` greedy tokens of each prompt.

    Args:
        prompts: a torch tensor of token ids, (texts, tokens).
    """
    for _ in sys.stdin:
        began = time.perf_counter()
        found = model.generate(
            prompts,
            attention_mask=prompts.new_ones(prompts.shape),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "tokens": found[:, prompts.shape[1] :].tolist()})


class Served:
    """A process that reads a line of stdin and answers by `answer`, repeatedly."""

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
        """The next answer of the process; other lines of its output are skipped.

        Raises:
            RuntimeError: the process has ended, for example as a module is missing.
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
