"""Compiled programs are kept from run to run, in the user's cache folder."""

import logging
from functools import cache
from pathlib import Path
from typing import Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

from zinf.core.process.user_cache import programs_name, prune, user_cache

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
KEPT_SECONDS = 30 * 24 * 3600.0
# What compiles faster than this is not worth a file.
MIN_COMPILE_SECONDS = 0.05
ENABLED, DIRECTORY = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
JAX_MIN_SECONDS = 1.0  # jax's own default of the same
# The folders that zinf has named to jax.
_named: set[str] = set()


def keep_compiled(asked: Literal["auto", False] | Path) -> None:
    """Make jax keep compiled programs in a folder, and read them from it.

    It is jax's persistent compilation cache, for all that this process compiles from
    now on. Whoever has named a folder to jax, or turned its cache off, keeps that.

    Args:
        asked: "auto" is a folder for this jaxlib and processor in the user's cache
            folder, of at most 4 GiB; False keeps nothing.
    """
    current = getattr(jax.config, DIRECTORY)
    if asked is False:
        if current in _named:
            _use(None)
        return
    if not getattr(jax.config, ENABLED) or current is not None:
        return
    try:
        folder = Path(asked).absolute()
        if asked == "auto":
            folder = user_cache() / "compiled" / programs_name()
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        _prune_once(folder)
    except (OSError, RuntimeError) as error:
        logger.info("Compiled programs are not kept: %s", error)
        return
    if is_new:
        logger.warning(
            "Compiled programs are kept in %s, at most %d GiB of them, so that the "
            "next start is faster. compile_cache names another folder; false keeps "
            "none.",
            folder,
            MAX_BYTES >> 30,
        )
    _use(folder)


def _use(folder: Path | None) -> None:
    if folder is not None:
        _named.add(str(folder))
    jax.config.update(DIRECTORY, None if folder is None else str(folder))
    if getattr(jax.config, MIN_SECONDS) == JAX_MIN_SECONDS:
        jax.config.update(MIN_SECONDS, MIN_COMPILE_SECONDS)
    # jax looks once whether there is a folder.
    compilation_cache.reset_cache()


@cache
def _prune_once(folder: Path) -> None:
    prune(folder, max_bytes=MAX_BYTES, max_seconds=KEPT_SECONDS)
