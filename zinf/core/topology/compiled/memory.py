"""The bytes that a compiled program needs, and what it lacks if it does not fit."""

import re
from dataclasses import dataclass
from typing import Any

# XLA rounds bytes to two decimals, in binary units.
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = r"([\d.]+)\s*([BKMGT]?)i?B?"
# The TPU compiler counts only temporaries in the first message, and arguments too in
# the second.
EXCEEDED = (
    re.compile(rf"\({SIZE}\) exceeds available \w+ \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} \w+"),
)
EXHAUSTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program on one device, and in the host's memory for it.

    Aliased bytes are results in the memory of donated arguments.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_temp_bytes: int
    host_alias_bytes: int

    @property
    def device_bytes(self) -> int:
        """Device memory while the program runs, without its code."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory, per device, while the program runs."""
        held = self.host_argument_bytes + self.host_output_bytes
        return held - self.host_alias_bytes + self.host_temp_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """Device memory that a program needs, and that is available."""

    needed_bytes: int
    available_bytes: int


def memory(compiled: Any) -> Memory:
    """The bytes of a `jax.stages.Compiled`, from XLA's buffer assignment."""
    found = compiled.memory_analysis()
    return Memory(
        argument_bytes=found.argument_size_in_bytes,
        output_bytes=found.output_size_in_bytes,
        temp_bytes=found.temp_size_in_bytes,
        alias_bytes=found.alias_size_in_bytes,
        host_argument_bytes=found.host_argument_size_in_bytes,
        host_output_bytes=found.host_output_size_in_bytes,
        host_temp_bytes=found.host_temp_size_in_bytes,
        host_alias_bytes=found.host_alias_size_in_bytes,
    )


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The compiler's sentence on lacking memory; None if the error is another.

    The TPU compiler refuses a program that does not fit. XLA for GPUs compiles it, so
    compare `Memory.device_bytes` with the memory of the GPU.

    Raises:
        ValueError: the compiler ran out of memory, but its message has an unknown form.
    """
    text = str(error)
    if EXHAUSTED not in text:
        return None
    for pattern in EXCEEDED:
        if found := pattern.search(text):
            needed, needed_unit, available, available_unit = found.groups()
            return OutOfMemory(
                round(float(needed) * UNITS[needed_unit]),
                round(float(available) * UNITS[available_unit]),
            )
    raise ValueError(
        "The compiler ran out of device memory and said so in a way that is not known: "
        f"{text[:300]!r}."
    ) from error
