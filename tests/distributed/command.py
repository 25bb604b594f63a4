"""`zinf train` in one process of several, which may do something on its own."""

import os
import resource
import signal
from collections.abc import Callable

import zinf.trainer
from zinf.cli import app
from zinf.engine import Engine

SMALL_BYTES = 12 * 1024  # more than a process prints


def interrupted(engine: Engine) -> None:
    """A Ctrl-C that only this process gets, within a step."""
    os.kill(os.getpid(), signal.SIGINT)


def broken(engine: Engine) -> None:
    raise OSError(5, "Input/output error", "/drive/chunk")


def killed(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(engine: Engine) -> None:
    """No file of this process can be as large as an embedding from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, SMALL_BYTES))


def nothing(engine: Engine) -> None: ...


DEEDS = {deed.__name__: deed for deed in (interrupted, broken, killed, full, nothing)}


def main(deed: str, at_step: str, *arguments: str) -> None:
    """Run `zinf ARGUMENTS`, and do the deed at the start of a step."""
    take: Callable = Engine.step

    def step(engine: Engine, batch: object) -> object:
        if engine.num_steps + 1 == int(at_step):
            DEEDS[deed](engine)
        return take(engine, batch)

    zinf.trainer.Engine.step = step
    app(list(arguments))
