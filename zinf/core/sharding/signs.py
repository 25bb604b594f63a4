"""Momenta that are averaged over devices by their signs (1-bit Adam).

Tang et al. 2021, "1-bit Adam", algorithm 1 (arXiv:2102.02888): after a warm-up each
device updates the momentum with its own gradient, sends the signs of all numbers and
one scale, the root mean square, and keeps what that loses. Device i averages what it
gets of part i, and sends the signs of the average to all, with a scale, keeping what
that loses too.

The gradient that leads to such a momentum is handed to the optimizer: (m' - b1 m) /
(1 - b1), if m becomes m'. So norms and updates need to know nothing of signs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.sharding.layout import Layout
from zinf.core.sharding.parts import DEVICE_DIM, AbstractParts

DEVICE = "device"
# With fewer numbers for each device, scales and padding would hardly save bytes.
MIN_NUMBERS = 64


@dataclass(frozen=True)
class Signs:
    """How 1-bit Adam averages momenta.

    Attributes:
        b1: the decay of the momentum.
        freeze_step: updates of the warm-up, whose gradients are averaged as they are.
    """

    b1: float
    freeze_step: int

    def is_worth_it(self, total: Layout, num_devices: int) -> bool:
        """Whether a gradient of this layout is sent by its signs."""
        is_large = prod(total.shape) >= MIN_NUMBERS * num_devices
        return len(total.shape) > 1 and is_large


@dataclass(frozen=True)
class SignedParts(AbstractParts):
    """Parts that devices send by the signs of momenta; each gets the whole gradient.

    Attributes:
        total: every device has it whole.
    """

    signs: Signs

    error_dtype: ClassVar[str] = "float32"
    state: ClassVar[str] = "mu"

    @cached_property
    def errors(self) -> tuple[Layout, ...]:
        """The layouts of the errors: of what a device sends of all numbers, and of the
        averages that it sends to all."""
        whole = self.mesh.size * self._chunk
        shapes = [(1, self.mesh.size, n) for n in (whole, self._chunk)]
        return tuple(replace(self.layout, shape=x, padded=x) for x in shapes)

    @property
    def _chunk(self) -> int:
        """The numbers that one device averages, in whole bytes of signs."""
        return -(-prod(self.total.shape) // (8 * self.mesh.size)) * 8

    def exchange(
        self, parts: Any, errors: Sequence[Any], dtype: Any, state: Any = None
    ) -> tuple[Any, list[Any]]:
        """See `AbstractParts`; the gradient leads to the average momentum."""
        devices = self.mesh.devices.reshape(-1)
        mesh = Mesh(devices, (DEVICE,), axis_types=(AxisType.Auto,))
        own, whole = PartitionSpec(None, DEVICE), PartitionSpec()
        # Devices put the same whole together, which shard_map cannot see.
        run = jax.shard_map(
            self._exchange_here,
            mesh=mesh,
            in_specs=(own, own, own, whole),
            out_specs=(whole, own, own),
            check_vma=False,
        )
        sharding = NamedSharding(mesh, own)
        given = [
            jax.lax.with_sharding_constraint(x, sharding) for x in (parts, *errors)
        ]
        total, *new = run(given[0], given[1], given[2], state)
        constrained = jax.lax.with_sharding_constraint
        pairs = zip(new, self.errors, strict=True)
        new = [constrained(error, layout.device) for error, layout in pairs]
        return constrained(total.astype(dtype), self.total.device), new

    def _exchange_here(
        self, part: Any, worker: Any, server: Any, momentum: Any
    ) -> tuple[Any, Any, Any]:
        b1, count, size = self.signs.b1, self.mesh.size, prod(self.total.shape)
        # Parts are of the mean over all devices.
        gradient = count * jnp.squeeze(part, DEVICE_DIM).astype(jnp.float32)
        own = (b1 * momentum + (1 - b1) * gradient).reshape(-1)
        sent = jnp.pad(own, (0, count * self._chunk - size)) + worker.reshape(-1)
        scale = _root_mean_square(sent)
        lost = sent - scale * _sign(sent)
        signs = jnp.packbits((sent >= 0).reshape(count, -1), axis=-1)
        received = jax.lax.all_to_all(signs, DEVICE, 0, 0, tiled=True)
        scales = jax.lax.all_gather(scale, DEVICE)
        average = (_unpacked(received) * (scales[:, None] / count)).sum(0)
        average = average + server.reshape(-1)
        again = _root_mean_square(average)
        lost_again = average - again * _sign(average)
        all_signs = jax.lax.all_gather(jnp.packbits(average >= 0), DEVICE)
        all_scales = jax.lax.all_gather(again, DEVICE)
        new = (_unpacked(all_signs) * all_scales[:, None]).reshape(-1)[:size]
        total = (new.reshape(self.total.shape) - b1 * momentum) / (1 - b1)
        return total, lost.reshape(worker.shape), lost_again.reshape(server.shape)


def _root_mean_square(x: Any) -> Any:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _sign(x: Any) -> Any:
    """+1 or -1; that of zero is +1."""
    return jnp.where(x >= 0, 1.0, -1.0).astype(jnp.float32)


def _unpacked(signs: Any) -> Any:
    """Bits, (..., n / 8), as numbers of +1 and -1."""
    return jnp.unpackbits(signs, axis=-1).astype(jnp.float32) * 2 - 1
