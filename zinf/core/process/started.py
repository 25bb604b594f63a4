"""What the environment said when jax's backends started, as far as that can be known.

XLA reads some variables once, when a backend starts, and tells nobody what it read. A
program that sets one later changes nothing, but `os.environ` looks as if it had. So
this module keeps the environment of the moment when zinf is imported, if no backend had
started by then. The environment that Python itself got is known from Linux.
"""

import os
import sys
from pathlib import Path

AT_EXEC = Path("/proc/self/environ")


def could_have_read(name: str) -> tuple[str | None, ...]:
    """The values of a variable that a backend may have read; None where it is not set.

    It is one value if the environment has not changed since Python started, or since
    zinf was imported before a backend started. Else it is what the variable is now, and
    what it was.
    """
    now, first = os.environ.get(name), _at_exec().get(name)
    if now == first or (IMPORTED is not None and IMPORTED.get(name) == now):
        return (now,)
    return (now, first)


def _has_backend() -> bool:
    """Whether jax has started a backend."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    # The public sign of it: this setting can then not be changed any more.
    found = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", found + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", found)
    return False


def _at_exec() -> dict[str, str]:
    """The environment that this process started with; outside Linux that of now."""
    try:
        content = AT_EXEC.read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(x).partition("=") for x in content.split(b"\0") if x)
    return {name: value for name, _, value in pairs}


IMPORTED = None if _has_backend() else dict(os.environ)
