"""ZeRO as shardings: which dim of an array is cut along the mesh, and by which stage.

A stage says what is cut on the devices (Rajbhandari et al. 2020, "ZeRO", section 5):
optimizer state from stage 1, gradients from 2, parameters from 3. On host and drive
everything is cut whatever the stage: each process keeps its own share there, and the
links of all of them work for every array ("bandwidth-centric partitioning",
Rajbhandari et al. 2021, "ZeRO-Infinity", section 6.1).
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from jax.sharding import Mesh

from zinf.mesh import FSDP, REPLICA, axis_size, present
from zinf.program import Role

STATE_STAGE, GRADIENT_STAGE, PARAM_STAGE = 1, 2, 3
# A share narrower than this wastes lanes of a TPU along the last dim.
LANES = 128
# A leading dim up to this may be that of stacked layers.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class ZeroRule:
    """How arrays are cut.

    Attributes:
        stage: 0 to 3.
        state_axes: mesh axes along which master, optimizer state and what rests off the
            device is cut; `param_axes` those of parameters and gradients on the device.
            They differ where each node has all parameters (ZeRO++'s hpZ).
        min_bytes: smaller arrays are not cut.
    """

    mesh: Mesh
    stage: int
    state_axes: tuple[str, ...]
    param_axes: tuple[str, ...]
    min_bytes: int

    def device_axes(self, role: Role) -> tuple[str, ...]:
        """The axes along which arrays of a role are cut on the devices, if at all."""
        if role == Role.PARAM:
            return self.param_axes if self.stage >= PARAM_STAGE else ()
        if role == Role.GRADIENT:
            return self.state_axes if self.stage >= GRADIENT_STAGE else ()
        return self.state_axes if self.stage >= STATE_STAGE else ()

    @property
    def num_shards(self) -> int:
        return axis_size(self.mesh, self.state_axes)

    def cut_dim(
        self, shape: tuple[int, ...], nbytes: int, *, may_pad: bool = True
    ) -> int | None:
        """The dim along which an array is cut into shares, None if it stays whole.

        Later dims come first: rows of the leading one are moved and updated on their
        own (a layer of a stack, a block), which a cut through them would make a
        collective. With `may_pad`, a dim that does not divide is padded with zeros.
        """
        count = self.num_shards
        # A shard of one number is compiled as a scalar, and may round otherwise than as
        # a part of the share, on the host.
        if count == 1 or nbytes < self.min_bytes or prod(shape) <= count:
            return None
        rows = [0] if len(shape) == 1 or shape[:1] > (MAX_LAYERS,) else []
        dims = [d for d in (*range(1, len(shape)), *rows) if shape[d] > 1]
        even = [d for d in dims if shape[d] % count == 0]
        last = len(shape) - 1
        wide = [d for d in even if d != last or shape[d] // count >= LANES]
        if wide or even:
            return (wide or even)[0]
        # The largest dim wastes least.
        return max(dims, key=lambda d: shape[d], default=None) if may_pad else None


def zero_rule(
    mesh: Mesh, *, stage: int, min_bytes: int, gathers_in_group: bool = False
) -> ZeroRule:
    """The rule of a stage on a mesh.

    Args:
        gathers_in_group: parameters are cut within a group of `fsdp` only, and all else
            along `replica` too (hpZ); otherwise groups are copies of each other (MiCS).

    Raises:
        ValueError: a group of hpZ has devices of several processes.
    """
    if gathers_in_group and stage >= PARAM_STAGE:
        _check_groups(mesh)
    param_axes = present(mesh, (FSDP,))
    state_axes = present(mesh, (REPLICA, FSDP)) if gathers_in_group else param_axes
    return ZeroRule(mesh, stage, state_axes, param_axes, min_bytes)


def _check_groups(mesh: Mesh) -> None:
    """A process's share of a parameter has to be among what its devices have of it."""
    if REPLICA not in mesh.shape:
        return
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(REPLICA), 0)
    for group in groups:
        processes = sorted({device.process_index for device in group.flat})
        if processes[1:]:
            raise ValueError(
                f"A group of {group.size} devices (zero_hpz_partition_size) has some "
                f"of the processes {', '.join(map(str, processes))}. Make it a divisor "
                "of the devices of a process, or use mics_shard_size."
            )
