"""Starts jax's own connection between the processes of a group."""

import socket
from collections.abc import Sequence

import jax

from zinf.distributed.group import AbstractGroup
from zinf.distributed.limits import Limits
from zinf.distributed.listen import is_own_address


def start_jax(
    group: AbstractGroup,
    host: str,
    *,
    limits: Limits,
    local_device_ids: Sequence[int] = (),
) -> None:
    """Initializes `jax.distributed` at a port that is free on the host of process 0.

    Args:
        host: an address of process 0's host, as written in "HOST:PORT".
        local_device_ids: the accelerators of this host that this process has; empty
            means all that it sees.
    """
    address = group.broadcast("jax address", f"{host}:{_free_port()}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The preemption service catches SIGTERM, so only SIGKILL could end a run.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        group.count,
        group.index,
        list(local_device_ids),
        "deactivate",
        coordinator_bind_address=(
            address if is_own_address(host.strip("[]")) else None
        ),
        initialization_timeout=round(limits.join_seconds) + 1,
        # When jax notices a lost process it aborts with a C++ stack trace. The timeout
        # is long enough that our error always comes first.
        heartbeat_timeout_seconds=3 * round(limits.silence_seconds) + 10,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]
