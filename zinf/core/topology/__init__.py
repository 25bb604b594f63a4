"""Describes machines that are absent, and reads programs compiled for them."""

from zinf.core.topology.absent import compile_for, only_read
from zinf.core.topology.chip import CHIPS, Chip
from zinf.core.topology.compiled import (
    Collective,
    HostCopy,
    Kind,
    Memory,
    OutOfMemory,
    Traffic,
    collectives,
    collectives_of,
    flops_of,
    host_copies,
    memory,
    out_of_memory,
    traffic,
)
from zinf.core.topology.topology import Topology, parse_topology

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "HostCopy",
    "Kind",
    "Memory",
    "OutOfMemory",
    "Topology",
    "Traffic",
    "collectives",
    "collectives_of",
    "compile_for",
    "flops_of",
    "host_copies",
    "memory",
    "only_read",
    "parse_topology",
    "out_of_memory",
    "traffic",
]
