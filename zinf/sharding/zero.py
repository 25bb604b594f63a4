"""ZeRO as shardings: which dim of an array is cut along the mesh, from which stage on.

The stage decides which arrays are cut on the devices (Rajbhandari et al. 2020, "ZeRO",
section 5): optimizer state from stage 1, gradients from 2, parameters from 3. On host
and drive all arrays are cut at every stage: each process stores its own share, so the
links of all processes move a part of every array ("bandwidth-centric partitioning",
Rajbhandari et al. 2021, "ZeRO-Infinity", section 6.1).
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from jax.sharding import Mesh

from zinf.mesh import FSDP, REPLICA, axis_size, present
from zinf.program import Role

STATE_STAGE, GRADIENT_STAGE, PARAM_STAGE = 1, 2, 3
# A shard narrower than this along the last dim wastes lanes of a TPU.
LANES = 128
# A leading dim up to this size may be a stack of layers, so it is not cut.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class ZeroRule:
    """How arrays are cut.

    Attributes:
        stage: the ZeRO stage, 0 to 3.
        state_axes: mesh axes that cut masters, optimizer state and gradients on the
            devices, and all arrays off the devices.
        param_axes: mesh axes that cut parameters on the devices. They differ from
            `state_axes` if each group has all parameters (ZeRO++'s hpZ).
        min_bytes: smaller arrays are not cut.
    """

    mesh: Mesh
    stage: int
    state_axes: tuple[str, ...]
    param_axes: tuple[str, ...]
    min_bytes: int

    def device_axes(self, role: Role) -> tuple[str, ...]:
        """The axes that cut arrays of a role on the devices; none if they are whole."""
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
        """The dim along which an array is cut into shares; None if it stays whole.

        Dims after the leading one are tried first: rows of the leading dim (layers of a
        stack, blocks) are moved and updated separately, which would need a collective
        if that dim were cut. With `may_pad`, a dim that does not divide evenly may be
        padded with zeros.
        """
        count = self.num_shards
        # Keep arrays whole whose shards would have one element: XLA compiles those as
        # scalars, which may round differently from the share on the host.
        if count == 1 or nbytes < self.min_bytes or prod(shape) <= count:
            return None
        rows = [0] if len(shape) == 1 or shape[:1] > (MAX_LAYERS,) else []
        dims = [d for d in (*range(1, len(shape)), *rows) if shape[d] > 1]
        even = [d for d in dims if shape[d] % count == 0]
        last = len(shape) - 1
        wide = [d for d in even if d != last or shape[d] // count >= LANES]
        if wide or even:
            return (wide or even)[0]
        # Padding the largest dim wastes least.
        return max(dims, key=lambda d: shape[d], default=None) if may_pad else None


def zero_rule(
    mesh: Mesh, *, stage: int, min_bytes: int, gathers_in_group: bool = False
) -> ZeroRule:
    """The rule of a stage on a mesh.

    Args:
        gathers_in_group: if true, parameters are cut along `fsdp` and all other arrays
            along `replica` too (hpZ). If false, all are cut along `fsdp` only, so the
            groups are copies of each other (MiCS).

    Raises:
        ValueError: a group of hpZ has devices of several processes.
    """
    if gathers_in_group and stage >= PARAM_STAGE:
        _check_groups(mesh)
    param_axes = present(mesh, (FSDP,))
    state_axes = present(mesh, (REPLICA, FSDP)) if gathers_in_group else param_axes
    return ZeroRule(mesh, stage, state_axes, param_axes, min_bytes)


def _check_groups(mesh: Mesh) -> None:
    """Raise unless each group's devices are of one process.

    The devices of a process must have all of its share of a parameter.
    """
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
