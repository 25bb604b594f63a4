"""What an attention runs on: its platform, and the devices that divide it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclass(frozen=True)
class Place:
    """The platform and the devices that an attention runs on.

    Attributes:
        platform: of its devices, such as "cpu".
        mesh: devices that divide it; None: it runs on one.
        examples, heads: the axes of the mesh that cut these.
    """

    platform: str
    mesh: Mesh | AbstractMesh | None = None
    examples: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def divides(self, operands: Mapping[str, Any]) -> bool:
        """Whether all devices have as many examples and heads of keys."""
        if self.mesh is None:
            return True
        batch, _, key_heads, _ = operands["k"].shape
        sizes = [
            prod(self.mesh.shape[name] for name in axes)
            for axes in (self.examples, self.heads)
        ]
        return batch % sizes[0] == 0 and key_heads % sizes[1] == 0


def in_parts(kernel: Callable, spec: Any, operands: Mapping[str, Any]) -> jax.Array:
    """A kernel that XLA cannot divide, on the examples and heads of each device.

    Args:
        kernel: takes `spec`, of one device, and `operands`.
        operands: q, k, v and maybe segments, which `spec.place` divides.
    """
    place = spec.place
    if place is None or place.mesh is None:
        return kernel(spec, operands)
    examples = place.examples or None
    by_heads = PartitionSpec(examples, None, place.heads or None, None)

    def spec_of(name: str, x: Any) -> PartitionSpec:
        if name in ("q", "k", "v"):
            return by_heads
        return PartitionSpec(examples if x.shape[0] > 1 else None, None)

    here = partial(kernel, replace(spec, place=Place(place.platform)))
    return jax.shard_map(
        here,
        mesh=place.mesh,
        in_specs=({name: spec_of(name, x) for name, x in operands.items()},),
        out_specs=by_heads,
        check_vma=False,
    )(dict(operands))
