"""Compiles for the devices of a mesh, present or absent."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import jax
from jax.sharding import Mesh

from zinf.core.topology.options import compile_with, options_for
from zinf.core.topology.pinned import keep_pinned
from zinf.core.topology.uncached import uncached

# XLA:CPU generates code quickly that is slow to run. The buffers of an executable stay
# the same, so its memory is that of the executable that runs. Without fusion emitters
# it would take a sixth of the time, but buffers of lookups would differ.
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}

_are_only_read: ContextVar[bool] = ContextVar("_are_only_read", default=False)


@contextmanager
def only_read() -> Iterator[None]:
    """While this context is open, executables are compiled to be read, never run.

    Planning alone asks only for their memory and shardings. On CPUs they compile in
    three quarters of the time.
    """
    token = _are_only_read.set(True)
    try:
        yield
    finally:
        _are_only_read.reset(token)


def compile_for(mesh: Mesh, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The executable of a program that was lowered for the devices of a mesh.

    Raises:
        jax.errors.JaxRuntimeError: the program does not compile; `out_of_memory` tells
            whether it ran out of memory.
    """
    first = mesh.devices.flat[0]
    platform, is_present = first.platform, first in _present(first.platform)
    if is_present and platform == "cpu":
        return lowered.compile(dict(QUICK) if _are_only_read.get() else None)
    options = options_for(platform, num_devices=mesh.size, is_present=is_present)
    if is_present:
        return compile_with(lowered, options)
    if platform == "gpu":
        keep_pinned(lowered)
    with uncached():
        return compile_with(lowered, options)


@lru_cache
def _present(platform: str) -> frozenset[jax.Device]:
    try:
        return frozenset(jax.devices(platform))
    except RuntimeError:
        return frozenset()
