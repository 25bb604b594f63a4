"""One process of a run under test: joins, does what its part says, and leaves."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from zinf.distributed import AbstractGroup, Flags, Limits, find_seat, join
from zinf.distributed.group import Joined

WAIT = 60.0
WORDS = "step 0"
SILENCE_SECONDS, HANG_SECONDS = 3.0, 1.0


def summing() -> Callable[[], float]:
    """Adds one element of every device of every process: n (n + 1) / 2 for n."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    local, index = jax.local_device_count(), jax.process_index()
    mine = 1.0 + np.arange(local, dtype=np.float32) + local * index
    x = jax.make_array_from_process_local_data(spread, mine)
    add = jax.jit(lambda x: x.sum(), out_shardings=whole)
    return lambda: float(add(x))


def talk(group: AbstractGroup) -> None:
    """Everything that a healthy group does."""
    total = summing()()
    print("sum", total, jax.device_count())
    print("gathered", group.gather("value", {"index": group.index}))
    print("again", group.gather("value", group.index))
    print("first", group.broadcast("from the first", group.index))
    print("any", group.any("last", group.index == group.count - 1))
    print("none", group.any("nobody", False))
    group.agree({"total": total})


def begin(group: AbstractGroup) -> Callable[[], float]:
    """A first collective of all; on return each knows what process 0 said last."""
    add = summing()
    group.say(WORDS)
    add()
    assert isinstance(group, Joined)
    while group._first_said != WORDS:
        time.sleep(0.01)
    group.barrier("all work")
    return add


def allow(group: AbstractGroup, **seconds: float) -> None:
    """Other limits from now on, on this process.

    Until here a loaded machine may take as long as it likes.
    """
    assert isinstance(group, Joined)
    group._limits = replace(group._limits, **seconds)
    if group._hub is not None:
        group._hub._limits = group._limits


def work(group: AbstractGroup) -> None:
    """Collectives until another process ends the run."""
    add = begin(group)
    while True:
        add()


def perish(group: AbstractGroup) -> None:
    """Work as the others do, then be killed while they wait in a collective."""
    begin(group)
    os.kill(os.getpid(), signal.SIGKILL)


def watch(group: AbstractGroup) -> None:
    """Work, and allow the others little silence."""
    add = begin(group)
    allow(group, silence_seconds=SILENCE_SECONDS)
    group.barrier("all allow little")
    while True:
        add()


def freeze(group: AbstractGroup) -> None:
    begin(group)
    allow(group, silence_seconds=SILENCE_SECONDS)
    group.barrier("all allow little")
    os.kill(os.getpid(), signal.SIGSTOP)


def stray(group: AbstractGroup) -> None:
    """Be alive, and make no progress."""
    group.say(WORDS)
    group.barrier("all is said")
    time.sleep(WAIT)


def err(group: AbstractGroup) -> None:
    begin(group)
    error = OSError(28, "No space left on device", "/drive/chunk")
    error.add_note("Free some space.")
    raise error


def dawdle(group: AbstractGroup) -> None:
    group.say("opening a file")
    group.say("reading a slow disk")
    group.barrier("all is said")
    allow(group, hang_seconds=HANG_SECONDS)
    time.sleep(WAIT)


def old_code(group: AbstractGroup) -> None: ...


PARTS = {
    part.__name__: part
    for part in (
        talk,
        work,
        perish,
        freeze,
        watch,
        stray,
        err,
        dawdle,
        old_code,
    )
}


def main(coordinator: str, count: str, index: str, part: str, seconds: str) -> None:
    if part == "old_code":
        module = sys.modules["zinf.distributed.join"]
        now = module.code_fingerprint
        module.code_fingerprint = lambda: {**now(), "zinf source": "0ld"}
    limits = Limits(float(seconds))
    seat = find_seat(Flags(coordinator, int(count), int(index)), {})
    with join(seat, limits) as group:
        PARTS[part](group)
