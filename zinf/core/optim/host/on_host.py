"""Chooses how an update runs on the host: the first of `WAYS` that can run it."""

from collections.abc import Sequence

import jax

from zinf.core.optim.host.chunked import chunked_updates
from zinf.core.optim.host.host_update import AbstractHostUpdate
from zinf.core.optim.host.looped import looped_updates
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit

# Fastest first.
WAYS = (looped_updates, chunked_updates)


def host_updates(
    separated: Separated, units: Sequence[Unit], *, device: jax.Device
) -> list[AbstractHostUpdate | None]:
    """For each unit its update on arrays in host memory, in place.

    None where its executable is as fast, or nothing else can run.

    Args:
        device: the one on which executables are made.
    """
    found: list[AbstractHostUpdate | None] = [None] * len(units)
    for updates_of in WAYS:
        rest = [i for i, update in enumerate(found) if update is None]
        some = updates_of(separated, [units[i] for i in rest], device=device)
        for i, update in zip(rest, some, strict=True):
            found[i] = update
    return found
