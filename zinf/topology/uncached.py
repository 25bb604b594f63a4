"""Compiling without jax's persistent cache."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax

SETTING = "jax_persistent_cache_min_compile_time_secs"


@contextmanager
def uncached() -> Iterator[None]:
    """Lets jax keep nothing of what is compiled inside, in this process.

    What was compiled for a device that is not there cannot be read back without it:
    jax would warn, and compile again, at every later run.
    """
    before = getattr(jax.config, SETTING)
    jax.config.update(SETTING, math.inf)
    try:
        yield
    finally:
        jax.config.update(SETTING, before)
