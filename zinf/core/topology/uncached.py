"""Compiles without writing to jax's persistent cache."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax

SETTING = "jax_persistent_cache_min_compile_time_secs"


@contextmanager
def uncached() -> Iterator[None]:
    """While this context is open, jax writes no executable to its persistent cache.

    jax cannot load an executable for an absent device from the cache: it would warn and
    compile again in every later run. The setting applies to the whole process.
    """
    before = getattr(jax.config, SETTING)
    jax.config.update(SETTING, math.inf)
    try:
        yield
    finally:
        jax.config.update(SETTING, before)
