"""The place of one process in a run: its index and how it reaches the others."""

from dataclasses import dataclass, field


class JoinError(ValueError):
    """The processes of a run cannot come together; the message says why."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in a run of `count` processes.

    Args:
        launcher: Where the values come from, for messages: "flags", "srun", ...
        coordinator: "HOST:PORT" that process 0 listens on and all others connect to.
        index: Index of this process, in `range(count)`.
        local_device_ids: Numbers of the accelerators of this host that this process
            uses; empty means all that it sees.
        token: What the processes of the run have in common, and strangers do not.
        is_secret: Whether others cannot guess the token.

    Raises:
        JoinError: The index is out of range, or the address is not HOST:PORT.
    """

    launcher: str
    coordinator: str
    count: int
    index: int
    local_device_ids: tuple[int, ...] = ()
    token: str = field(default="zinf", repr=False)
    is_secret: bool = False

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
        """Host (an IPv6 address without its brackets) and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)
