"""Where this process sits among those of the run: a value, checked when made."""

from dataclasses import dataclass

from zinf.distributed.secret import Secret


class JoinError(ValueError):
    """The processes of a run cannot come together; the message says why."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in a run of `count` processes.

    Args:
        launcher: What said so, for messages: "flags", "srun", ...
        coordinator: "HOST:PORT" that process 0 listens on and all others reach.
        index: Of this process, in `range(count)`.
        local_device_ids: The accelerators of this host that are this process's; empty:
            all that it sees.
        secret: What all processes of the run know; None: process 0 makes one in a file
            of its host, as all are there.

    Raises:
        JoinError: The index is out of range, or the address is not HOST:PORT.
    """

    launcher: str
    coordinator: str
    count: int
    index: int
    local_device_ids: tuple[int, ...] = ()
    secret: Secret | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise JoinError(
                f"The number of processes is {self.count} ({self.launcher}); it must "
                "be 1 or more (--num-processes)."
            )
        if not 0 <= self.index < self.count:
            raise JoinError(
                f"The process id is {self.index} of {self.count} processes "
                f"({self.launcher}); ids are 0 to {self.count - 1} (--process-id)."
            )
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise JoinError(
                f"The coordinator is {self.coordinator!r} ({self.launcher}); it must "
                "be HOST:PORT, an address of process 0 and a port that is free there, "
                "such as --coordinator node001:6200."
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host, without the brackets of an IPv6 address, and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)
