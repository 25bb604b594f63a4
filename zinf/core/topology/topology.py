"""A machine, perhaps absent, from a text such as "v5p:8x8x8" or "h200:8"."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from zinf.core.topology.chip import CHIPS, Chip
from zinf.core.topology.options import compile_with, options_for
from zinf.core.topology.pinned import keep_pinned
from zinf.core.topology.tpu import tpu_devices
from zinf.core.topology.uncached import uncached
from zinf_kernels.absent_gpu import GPUS, absent_devices

NUMBERS = re.compile(r"[1-9]\d*(x[1-9]\d*)*")
EXAMPLES = "v5p:8x8x8, v5e:16x16, h200:8 or h100:64"


@dataclass(frozen=True)
class Topology:
    """Devices of one kind, and their hosts.

    Attributes:
        text: the name of the topology, such as "v5p:8x8x8".
        shape: the shape of the torus, or only the number of GPUs.
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    num_devices: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_devices", math.prod(self.shape))

    @property
    def devices_per_host(self) -> int:
        return min(self.num_devices, self.chip.devices_per_host)

    @property
    def num_hosts(self) -> int:
        return self.num_devices // self.devices_per_host

    @property
    def link_bytes_per_second(self) -> int:
        """Bandwidth of a device to all others: that of the slowest link on the way."""
        inside = self.chip.interconnect_bytes_per_second
        outside = self.chip.network_bytes_per_second
        if self.num_hosts == 1 or outside is None:
            return inside
        return min(inside, outside)

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        """The options of a program over all its devices, none of which is here."""
        rest = {"num_devices": self.num_devices, "is_present": False}
        return options_for(self.chip.platform, **rest)

    def compile(self, lowered: Any) -> Any:
        """The `jax.stages.Compiled` of a `Lowered` over its devices; it never runs.

        Raises:
            jax.errors.JaxRuntimeError: the program does not compile. For TPUs,
                `out_of_memory` tells whether it ran out of memory; XLA for GPUs also
                compiles programs that do not fit.
        """
        if self.chip.platform == "gpu":
            keep_pinned(lowered)
        with uncached():
            return compile_with(lowered, self.compiler_options)

    def devices(self) -> list[Any]:
        """Its devices, in process order, for meshes to compile for but not to run on.

        Programs with shardings over these devices lower and compile for the machine,
        while this process uses its own devices as before. Absent GPUs report no
        memories, so arguments in pinned host memory count as device memory; results
        in it do not.

        Raises:
            NotImplementedError: the compiler for these devices is not installed.
            ValueError: the compiler does not support this machine.
        """
        if self.chip.platform == "tpu":
            return tpu_devices(self.text, self.shape)
        return absent_devices(
            GPUS[self.chip.name.upper()],
            num_hosts=self.num_hosts,
            devices_per_host=self.devices_per_host,
        )


def parse_topology(text: str) -> Topology:
    """The topology that a text describes.

    Args:
        text: a chip of `CHIPS`, a colon and the shape of the slice in chips (TPUs) or
            the number of GPUs.

    Raises:
        ValueError: the text has another form, the chip is unknown, or no such machine
            exists.
    """
    name, colon, size = text.strip().lower().partition(":")
    if not colon or not NUMBERS.fullmatch(size):
        raise ValueError(
            f"{text!r} is no topology. Write the chip, a colon and its size: "
            f"{EXAMPLES}."
        )
    if name not in CHIPS:
        raise ValueError(
            f"{text!r} asks for {name!r}, which is not in the catalogue of chips: "
            f"{', '.join(CHIPS)}."
        )
    chip = CHIPS[name]
    shape = tuple(map(int, size.split("x")))
    problem = _impossible(chip, shape)
    if problem:
        raise ValueError(f"{text!r} cannot be: {problem}")
    return Topology(text=f"{name}:{size}", chip=chip, shape=shape)


def _impossible(chip: Chip, shape: tuple[int, ...]) -> str | None:
    """The reason why no such machine exists; None if it may exist."""
    count = math.prod(shape)
    if chip.max_devices is not None and count > chip.max_devices:
        return (
            f"it has {count:,} chips and the largest slice of {chip.name} has "
            f"{chip.max_devices:,}."
        )
    if chip.num_torus_dims is None:
        if len(shape) > 1:
            return f"{chip.name} is a GPU, whose size is a number, as in {chip.name}:8."
        if count > chip.devices_per_host and count % chip.devices_per_host:
            return (
                f"{count} GPUs do not fill hosts of {chip.devices_per_host}. "
                f"Use up to {chip.devices_per_host}, or a multiple of it."
            )
        return None
    if len(shape) != chip.num_torus_dims:
        example = "x".join(["4"] * chip.num_torus_dims)
        return (
            f"the torus of {chip.name} has {chip.num_torus_dims} dims and this has "
            f"{len(shape)}. Write, for instance, {chip.name}:{example}."
        )
    if count > 1 and (shape[0] % 2 or shape[1] % 2):
        return (
            "a host holds 2 x 2 chips, so the first two dims must be even. Only a "
            "single chip may be less."
        )
    return None
