"""`zinf train` in one process of several, which may do something on its own."""

import os
import resource
import signal
import time
from collections.abc import Callable

import zinf.core.engine.engine
from zinf.cli import app
from zinf.core.engine.engine import Engine
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId

LAG_SECONDS = 0.01  # of each array; a step takes a few of them
SMALL_BYTES = 6 * 1024  # more than a process prints, less than its share


def interrupted(engine: Engine) -> None:
    """A Ctrl-C that only this process gets, within a step."""
    os.kill(os.getpid(), signal.SIGINT)


def killed(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(engine: Engine) -> None:
    """No file of this process can be as large as an embedding from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, SMALL_BYTES))


def nothing(engine: Engine) -> None: ...


def misread(engine: Engine) -> None:
    """The files of this process have other weights: see `main`."""


DEEDS = {deed.__name__: deed for deed in (interrupted, killed, full, misread, nothing)}


def later(read: Callable) -> Callable:
    def wait_and_read(residents: Residents, array: ArrayId) -> object:
        time.sleep(LAG_SECONDS)
        return read(residents, array)

    return wait_and_read


def plus_one(read: Callable) -> Callable:
    return lambda *arguments: read(*arguments) + 1


def main(deed: str, at_step: str, *arguments: str) -> None:
    """Run `zinf ARGUMENTS`, and do the deed at the start of a step.

    Who does one also reads what is saved later than others: so what all do in one order
    is not only so by chance.
    """
    take: Callable = Engine.step

    def step(engine: Engine, batch: object) -> object:
        if engine.num_steps + 1 == int(at_step):
            DEEDS[deed](engine)
        return take(engine, batch)

    zinf.core.engine.engine.Engine.step = step
    if deed == "misread":
        from zinf.hf.weights import StoredWeights

        StoredWeights.read = plus_one(StoredWeights.read)
    if deed != "nothing":
        Residents.read_share = later(Residents.read_share)
    app(list(arguments))
