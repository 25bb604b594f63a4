"""Which devices a config asks for.

This is read before the rest is checked: batch sizes depend on the number of devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zinf.core.config.load import override, raw_config
from zinf.core.config.schema import MeshAxes
from zinf.core.config.section import Section


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the devices that a config asks for are grouped.

    Attributes:
        num_replicas: groups of devices that each hold all state.
        num_shards: devices of a group, over those of the next; None: all devices.
        group_size: devices of a group that holds all parameters, in DeepSpeed's keys.
        inner: by axis, the devices of a group along the axis; axes of one device are
            left out.
    """

    num_replicas: int = 1
    num_shards: int | None = None
    group_size: int | None = None
    inner: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_given(self) -> bool:
        return self != Grouping()

    @property
    def num_data_parallel(self) -> int | None:
        """Devices that divide the examples of a batch; None: it depends on how many
        there are."""
        if self.num_shards is None:
            return None
        return self.num_replicas * self.num_shards * self.inner.get("expert", 1)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The sizes of the axes within a group, by their keys."""
        return {f"mesh.{axis}": size for axis, size in self.inner.items()}


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
    in_deepspeed = {
        "seq": raw.get("sequence_parallel_size"),
        "expert": size if is_on else None,
        "tensor": _section(raw, "tensor_parallel").get("autotp_size"),
    }
    inner = {
        axis: _count(mesh.get(axis)) or _count(in_deepspeed.get(axis)) or 1
        for axis in MeshAxes.model_fields
        if axis not in ("replica", "fsdp")
    }
    return Grouping(
        _count(mesh.get("replica")) or 1,
        _count(mesh.get("fsdp")),
        group_size,
        {axis: count for axis, count in inner.items() if count > 1},
    )


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
