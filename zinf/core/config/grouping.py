"""Which devices a config asks for.

This is read before the rest is checked: batch sizes depend on the number of devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zinf.core.config.load import override, raw_config
from zinf.core.config.section import Section


@dataclass(frozen=True, slots=True)
class Grouping:
    """Attributes:
    num_replicas: groups of devices that each hold all state.
    num_shards: devices of a group, over those of the next; None: all devices.
    group_size: devices of a group that holds all parameters, in DeepSpeed's keys.
    num_seq: devices that divide the positions of the same examples.
    num_expert: devices that divide the experts of a layer.
    num_tensor: devices that divide the weights of a layer.
    """

    num_replicas: int = 1
    num_shards: int | None = None
    group_size: int | None = None
    num_seq: int = 1
    num_expert: int = 1
    num_tensor: int = 1

    @property
    def is_given(self) -> bool:
        return self != Grouping()

    @property
    def num_data_parallel(self) -> int | None:
        """Devices that divide the examples of a batch; None: it depends on how many
        there are."""
        if self.num_shards is None:
            return None
        return self.num_replicas * self.num_shards * self.num_expert

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The sizes of the axes within a group that are not 1, by their keys."""
        sizes = {
            "mesh.seq": self.num_seq,
            "mesh.expert": self.num_expert,
            "mesh.tensor": self.num_tensor,
        }
        return {key: size for key, size in sizes.items() if size > 1}


def grouping(
    source: Mapping[str, Any] | str | Path | Section | None,
    overrides: Sequence[str] = (),
) -> Grouping:
    """The grouping that a config asks for; wrong values count as absent.

    Raises:
        FileNotFoundError, TypeError, ValueError: the config cannot be read.
    """
    raw = override(raw_config(source), overrides)
    mesh, zero = _section(raw, "mesh"), _section(raw, "zero_optimization")
    sizes = [zero.get("zero_hpz_partition_size"), zero.get("mics_shard_size")]
    group_size = next((size for size in map(_count, sizes) if size and size > 1), None)
    experts = _section(raw, "expert_parallel")
    is_on, size = experts.get("enabled") is True, experts.get("autoep_size")
    tensor = _count(_section(raw, "tensor_parallel").get("autotp_size"))
    return Grouping(
        _count(mesh.get("replica")) or 1,
        _count(mesh.get("fsdp")),
        group_size,
        _count(mesh.get("seq")) or _count(raw.get("sequence_parallel_size")) or 1,
        _count(mesh.get("expert")) or (_count(size) if is_on else 1) or 1,
        _count(mesh.get("tensor")) or tensor or 1,
    )


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
