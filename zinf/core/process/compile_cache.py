"""Compiled programs are kept from run to run, in the user's cache folder.

What else the next start need not find out again, plans and rates, is kept beside them.
"""

import hashlib
import logging
import os
import platform
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from zinf.core.process.user_cache import (
    own_digest,
    processor,
    programs_name,
    prune,
    user_cache,
)

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
KEPT_SECONDS = 30 * 24 * 3600.0
# Also what compiles in 10 ms: reading it takes 2, and a start has some forty of them.
MIN_COMPILE_SECONDS = 0.0
ENABLED, DIRECTORY = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
JAX_MIN_SECONDS = 1.0  # jax's own default of the same
# The folder of plans and rates within that of compiled programs; an entry has some KB.
STARTS = "starts"
MAX_STARTS_BYTES = 64 << 20
# Environment variables that jax's compilers read.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
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


def starts_folder() -> Path | None:
    """The folder for what starts find out; it may not exist yet.

    None if nothing is to be kept, or if jax was told by others where to keep programs.
    """
    current = getattr(jax.config, DIRECTORY)
    if current not in _named or not getattr(jax.config, ENABLED):
        return None
    folder = Path(current) / STARTS
    _prune_starts(folder)
    return folder


def machine_digest(mesh: Mesh) -> str:
    """A digest of what compiles and runs on a mesh, but for the programs.

    That is the machine with its processor and cores, the devices, the versions of zinf
    and of what it computes with, and the flags of the compiler.
    """
    devices = [(d.platform, d.device_kind) for d in mesh.devices.flat]
    flags = {n: v for n, v in os.environ.items() if n in FLAGS}
    parts = (
        platform.node(),
        processor(),
        os.cpu_count(),
        sys.version,
        [version(name) for name in ("jax", "jaxlib", "numpy")],
        own_digest(),
        sorted(flags.items()),
        dict(mesh.shape),
        devices,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _use(folder: Path | None) -> None:
    if folder is not None:
        _named.add(str(folder))
    jax.config.update(DIRECTORY, None if folder is None else str(folder))
    if getattr(jax.config, MIN_SECONDS) == JAX_MIN_SECONDS:
        jax.config.update(MIN_SECONDS, MIN_COMPILE_SECONDS)
    # jax looks once whether there is a folder.
    compilation_cache.reset_cache()


@cache
def _prune_starts(folder: Path) -> None:
    try:
        prune(folder, max_bytes=MAX_STARTS_BYTES, max_seconds=KEPT_SECONDS)
    except OSError:
        return  # It does not exist yet.


@cache
def _prune_once(folder: Path) -> None:
    prune(folder, max_bytes=MAX_BYTES, max_seconds=KEPT_SECONDS)
