"""What devices send by its signs, with two errors that are fed back.

Tang et al. 2021, "1-bit Adam", algorithm 1 (arXiv:2102.02888), and Li et al. 2021,
"1-bit LAMB" (arXiv:2104.06069): after a warm-up each device updates the momentum with
its own gradient, sends the signs of all numbers and one scale, the root mean square,
and keeps what that loses. Device i averages what it gets of part i, and sends the signs
of the average to all, with a scale, keeping what that loses too. 0/1 Adam sends its
gradients and its steps in the same way (`local_steps.py`).

The gradient that leads to such a momentum is handed to the optimizer: (m' - b1 m) /
(1 - b1), if m becomes m'. So norms and updates need to know nothing of signs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.sharding.layout import Layout
from zinf.core.sharding.parts import DEVICE_DIM, AbstractParts
from zinf.core.sharding.wire import cut

DEVICE = "device"
# With fewer numbers for each device, scales and padding would hardly save bytes.
MIN_NUMBERS = 64
# Among the errors of a leaf: of the averages, after those of what a device sends.
AVERAGES = 1


class Phase(StrEnum):
    """What devices send in a step; each phase of a run is a program of its own."""

    PLAIN = "gradients as they are"
    MOMENTA = "momenta by their signs"
    GRADIENTS = "gradients by their signs"
    LOCAL = "nothing"
    STEPS = "sums of local steps by their signs"

    @property
    def is_local(self) -> bool:
        """Whether devices have other parameters when the step begins."""
        return self in (Phase.LOCAL, Phase.STEPS)


@dataclass(frozen=True)
class AbstractCompression(ABC):
    """What an optimizer sends in each of its steps.

    Attributes:
        name: of the optimizer, for messages.
        phases: all that may occur.
        num_rates: how many numbers `rates` returns.
        largest_stage: of ZeRO, that it can be with.
        state: optax's name of the state that its exchanges read; empty: none.
    """

    name: str

    phases: ClassVar[tuple[Phase, ...]]
    num_rates: ClassVar[int] = 0
    largest_stage: ClassVar[int] = 0
    state: ClassVar[str] = ""

    @property
    @abstractmethod
    def warm_up(self) -> int:
        """The number of first steps in which gradients go as they are."""

    @abstractmethod
    def phase(self, number: int) -> Phase:
        """That of a step, by the number of steps before it."""

    @abstractmethod
    def parts(self, total: Layout, phase: Phase) -> AbstractParts | None:
        """How a gradient of this layout is sent in a phase; None: as it is.

        The errors of all phases have the same layouts.
        """

    @abstractmethod
    def in_words(self, num_leaves: int) -> str:
        """What is sent of so many leaves and when, for the plan."""

    def forgets(self, number: int) -> bool:
        """Whether errors are set to zero before a step."""
        del number
        return False

    def rates(self, number: int, rate: Callable[[int], Any]) -> tuple[float, ...]:
        """Numbers that the program of a step reads.

        Args:
            rate: the learning rate by the number of updates done.
        """
        del number, rate
        return ()


@dataclass(frozen=True)
class Momenta(AbstractCompression):
    """1-bit Adam and 1-bit LAMB: after `freeze_step` updates, signs of momenta.

    Attributes:
        b1: the decay of the momentum.
    """

    b1: float
    freeze_step: int

    phases = (Phase.MOMENTA, Phase.PLAIN)
    largest_stage = 1
    state = "mu"

    @property
    def warm_up(self) -> int:
        return self.freeze_step

    def phase(self, number: int) -> Phase:
        return Phase.PLAIN if number < self.freeze_step else Phase.MOMENTA

    def parts(self, total: Layout, phase: Phase) -> AbstractParts | None:
        if phase == Phase.PLAIN or not is_worth_signs(total):
            return None
        return MomentumParts(total, self.b1)

    def in_words(self, num_leaves: int) -> str:
        after = f"After {self.freeze_step:,} updates, momenta of {num_leaves} leaves"
        return f"{after} are averaged by their signs"


def is_worth_signs(total: Layout) -> bool:
    """Whether a gradient of this layout saves bytes if it goes by signs."""
    assert isinstance(total.device.mesh, Mesh)
    is_large = prod(total.shape) >= MIN_NUMBERS * total.device.mesh.size
    return len(total.shape) > 1 and is_large


@dataclass(frozen=True)
class SignedParts(AbstractParts):
    """Parts that devices send by signs; each gets the whole gradient.

    Attributes:
        total: every device has it whole.
    """

    error_dtype: ClassVar[str] = "float32"

    @cached_property
    def errors(self) -> tuple[Layout, ...]:
        """The layouts of the errors: of what a device sends of all numbers, and of the
        averages that it sends to all."""
        shapes = self.error_shapes(self.mesh.size)
        return tuple(replace(self.layout, shape=x, padded=x) for x in shapes)

    def error_shapes(self, count: int) -> tuple[tuple[int, ...], ...]:
        chunk = self._chunk(count)
        return (1, count, count * chunk), (1, count, chunk)

    def joined(self, slot: int, errors: np.ndarray) -> np.ndarray:
        """See `AbstractParts`. What all devices lost together is what all lost before:
        the mean of what they lost of their own, and the averages in their order."""
        shape = self.errors[slot].shape
        mine = errors.mean(1) if slot != AVERAGES else errors
        mine = mine.reshape(-1)[: prod(self.total.shape)]
        if slot == AVERAGES:
            return np.pad(mine, (0, prod(shape) - mine.size)).reshape(shape)
        mine = np.pad(mine, (0, prod(shape[2:]) - mine.size)).reshape(shape[2:])
        return np.broadcast_to(mine, shape)

    def _chunk(self, count: int) -> int:
        """The numbers that one of so many devices averages, in whole bytes of signs."""
        return -(-prod(self.total.shape) // (8 * count)) * 8

    def exchange(
        self, parts: Any, errors: Sequence[Any], dtype: Any, state: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """See `AbstractParts`."""

        def run(part: Any, errors: Any, state: Any) -> tuple[Any, list[Any], Any]:
            # Parts are of the mean over all devices.
            gradient = self.mesh.size * jnp.squeeze(part, DEVICE_DIM)
            return self._exchange_here(gradient.astype(jnp.float32), errors, state)

        own, whole = PartitionSpec(None, DEVICE), PartitionSpec()
        if state is not None:
            state = self.total.unpadded(state)
        mapped = on_each_device(self.mesh, run, (own, own, whole), (whole, own, whole))
        total, new, state = mapped(parts, list(errors), state)
        constrained = jax.lax.with_sharding_constraint
        pairs = zip(new, self.errors, strict=True)
        new = [constrained(error, layout.device) for error, layout in pairs]
        total = constrained(total.astype(dtype), self.total.device)
        if state is not None:
            state = cut(state, self.total)
        return cut(total, self.total), new, state

    def _exchange_here(
        self, gradient: Any, errors: Sequence[Any], state: Any
    ) -> tuple[Any, list[Any], Any]:
        """The gradient that all devices take, the new errors of this one, and the new
        state of all.

        Args:
            gradient: of this device, as if its examples were all.
        """
        del state
        worker, server, *others = errors
        mean, *new = self.average(gradient, worker, server)
        return mean, [*new, *others], None

    def average(self, own: Any, worker: Any, server: Any) -> tuple[Any, Any, Any]:
        """The mean over devices by signs and the new errors; inside `shard_map`."""
        count, size = self.mesh.size, prod(self.total.shape)
        sent = jnp.pad(own.reshape(-1), (0, count * self._chunk(count) - size))
        sent = sent + worker.reshape(-1)
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
        mean = (_unpacked(all_signs) * all_scales[:, None]).reshape(-1)[:size]
        mean = mean.reshape(self.total.shape)
        return mean, lost.reshape(worker.shape), lost_again.reshape(server.shape)


@dataclass(frozen=True)
class MomentumParts(SignedParts):
    """Parts that lead to the mean of the momenta by signs.

    Attributes:
        b1: the decay of the momentum.
    """

    b1: float
    state = Momenta.state

    def _exchange_here(
        self, gradient: Any, errors: Sequence[Any], state: Any
    ) -> tuple[Any, list[Any], Any]:
        own = self.b1 * state + (1 - self.b1) * gradient
        new, *lost = self.average(own, *errors)
        # At stage 1 an update has a part of the momentum, and all is needed next time.
        return (new - self.b1 * state) / (1 - self.b1), lost, new


def on_each_device(mesh: Mesh, run: Any, inputs: Any, outputs: Any) -> Any:
    """`run` as a function of global arrays, called with the part of each device.

    Args:
        inputs, outputs: specs over the one axis `DEVICE`, along which all devices are.
    """
    line = Mesh(mesh.devices.reshape(-1), (DEVICE,), axis_types=(AxisType.Auto,))
    # Devices put the same whole together, which shard_map cannot see.
    mapped = jax.shard_map(
        run, mesh=line, in_specs=inputs, out_specs=outputs, check_vma=False
    )

    shardings = jax.tree.map(
        lambda spec: NamedSharding(line, spec),
        inputs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def placed(*arguments: Any) -> Any:
        return mapped(*jax.lax.with_sharding_constraint(arguments, shardings))

    return placed


def _root_mean_square(x: Any) -> Any:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _sign(x: Any) -> Any:
    """+1 or -1; that of zero is +1."""
    return jnp.where(x >= 0, 1.0, -1.0).astype(jnp.float32)


def _unpacked(signs: Any) -> Any:
    """Bits, (..., n / 8), as numbers of +1 and -1."""
    return jnp.unpackbits(signs, axis=-1).astype(jnp.float32) * 2 - 1
