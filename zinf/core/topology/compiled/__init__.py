"""Reads the traffic, host copies and memory of a compiled program."""

from zinf.core.topology.compiled.collective import (
    Collective,
    Traffic,
    collectives,
    collectives_of,
    traffic,
)
from zinf.core.topology.compiled.find import Kind
from zinf.core.topology.compiled.flops import flops_of
from zinf.core.topology.compiled.host_copy import HostCopy, host_copies
from zinf.core.topology.compiled.memory import (
    Memory,
    OutOfMemory,
    memory,
    out_of_memory,
)

__all__ = [
    "Collective",
    "HostCopy",
    "Kind",
    "Memory",
    "OutOfMemory",
    "Traffic",
    "collectives",
    "collectives_of",
    "flops_of",
    "host_copies",
    "memory",
    "out_of_memory",
    "traffic",
]
