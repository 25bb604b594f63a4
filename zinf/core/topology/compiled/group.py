"""Reads the group size of a collective, which XLA writes in three ways.

`{{0,1},{2,3}}` lists the groups. `[2,4]<=[4,2]T(1,0)` cuts a transposed range into 2
groups of 4. `mesh['a'=2,'b'=4] {'b'}` names axes of a mesh, and `'b':(1)2` names a part
of an axis.
"""

import math
import re

LISTED = re.compile(r"^\{\{([\d,]*)\}")
RANGE = re.compile(r"^\[(\d+),(\d+)\]<=")
MESH = re.compile(r"^mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
AXIS = re.compile(r"'([^']*)'=(\d+)")
USED = re.compile(r"'([^']*)'(?::\(\d+\)(\d+))?")
GROUPS = re.compile(r"\breplica_groups=(.*)")
PAIRS = re.compile(r"\{(\d+),(\d+)\}")


def group_size(attributes: str, num_devices: int) -> int:
    """Devices in one group of a collective; all devices if no groups are given.

    Raises:
        NotImplementedError: the groups are written in an unknown way.
    """
    said = GROUPS.search(attributes)
    if said is None or said.group(1).startswith("{}"):
        return num_devices
    groups = said.group(1)
    if listed := LISTED.match(groups):
        return len(listed.group(1).split(","))
    if cut := RANGE.match(groups):
        return int(cut.group(2))
    if mesh := MESH.match(groups):
        sizes = {name: int(size) for name, size in AXIS.findall(mesh.group(1))}
        return math.prod(
            int(part) if part else sizes[name]
            for name, part in USED.findall(mesh.group(2))
        )
    raise NotImplementedError(
        f"XLA wrote the groups of a collective in an unknown way: {groups[:80]!r}. "
        "Known are {{0,1},{2,3}}, [2,4]<=[8] and mesh['a'=2,'b'=4] {'b'}."
    )


def num_senders(attributes: str) -> int:
    """Number of devices that send to another device in a collective-permute."""
    pairs = attributes.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
    return sum(source != target for source, target in PAIRS.findall(pairs))
