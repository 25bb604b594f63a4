"""How many bytes a compiled program needs, and by how many it does not fit."""

import re
from dataclasses import dataclass
from typing import Any

# XLA's figures are rounded to two digits, in units of 1024.
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = r"([\d.]+)\s*([BKMGT]?)i?B?"
# Temporaries alone; arguments, temporaries and all; what the GPU's allocator says.
EXCEEDED = (
    re.compile(rf"\({SIZE}\) exceeds available \w+ \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} \w+"),
)
EXHAUSTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program on one device, and in the host's memory for it.

    Aliased bytes are results that take the place of donated arguments. A GPU that is
    not there reports no host memory, so arguments in it count as the device's.
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
        """Device memory while the program runs, its own code left out."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory, per device, while the program runs."""
        held = self.host_argument_bytes + self.host_output_bytes
        return held - self.host_alias_bytes + self.host_temp_bytes


@dataclass(frozen=True)
class Shortage:
    """What a program needs of a device's memory and what there is, in bytes."""

    needed_bytes: int
    available_bytes: int


def memory(compiled: Any) -> Memory:
    """The bytes of a `jax.stages.Compiled`, as XLA's buffer assignment says."""
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


def shortage(error: BaseException) -> Shortage | None:
    """What an error of the compiler says of memory, None if it is another error.

    The TPU compiler refuses a program that does not fit. XLA for GPUs compiles it all
    the same: compare `Memory.device_bytes` with the memory of the device there.

    Raises:
        ValueError: it is out of memory, but says no figures that this knows.
    """
    text = str(error)
    if EXHAUSTED not in text:
        return None
    for pattern in EXCEEDED:
        if found := pattern.search(text):
            needed, needed_unit, available, available_unit = found.groups()
            return Shortage(
                round(float(needed) * UNITS[needed_unit]),
                round(float(available) * UNITS[available_unit]),
            )
    raise ValueError(
        "The compiler ran out of device memory and said so in a way that is not known: "
        f"{text[:300]!r}."
    ) from error
