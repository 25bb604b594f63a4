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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.sharding.layout import Layout
from zinf.core.sharding.parts import DEVICE_DIM, AbstractParts
from zinf.core.sharding.wire import cut

DEVICE = "device"
# With fewer numbers, scales and padding would hardly save bytes. It is the same on any
# number of devices, and so is which leaves have errors.
MIN_NUMBERS = 128
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


# Of a leaf, by "master" and by optax's names of its states.
Arrays = Mapping[str, np.ndarray]


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

    @abstractmethod
    def merged(
        self, number: int, errors: Sequence[np.ndarray], arrays: Arrays
    ) -> dict[str, np.ndarray]:
        """The arrays of a leaf on one device, which sends nothing, after a restore of
        what several devices saved; only those that change.

        Args:
            number: of steps before the restore.
            errors: of the leaf, as `AbstractParts.joined` makes them for one device.
            arrays: of the leaf, as they were saved: its master and its states.
        """

    def begun(
        self, number: int, shapes: Sequence[tuple[int, ...]], arrays: Arrays
    ) -> dict[int, np.ndarray]:
        """The errors of a leaf, by slot, after a restore of what one device saved; all
        others are zero.

        Args:
            shapes: of all errors of the leaf.
        """
        del number, shapes, arrays
        return {}


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

    def merged(
        self, number: int, errors: Sequence[np.ndarray], arrays: Arrays
    ) -> dict[str, np.ndarray]:
        """See `AbstractCompression`: the next momentum has what was lost."""
        del number
        return with_lost(errors, arrays, self.b1, 1.0)


def is_worth_signs(total: Layout) -> bool:
    """Whether a gradient of this layout saves bytes if it goes by signs."""
    return len(total.shape) > 1 and prod(total.shape) >= MIN_NUMBERS


def lost_by(errors: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """What exchanges by signs lost and one device has to make up for.

    Args:
        errors: as `AbstractParts.joined` makes them for one device.
        shape: of the leaf.
    """
    lost = errors[0].reshape(-1) + errors[AVERAGES].reshape(-1)
    return lost[: prod(shape)].reshape(shape)


def with_lost(
    errors: Sequence[np.ndarray], arrays: Arrays, b1: float, share: float
) -> dict[str, np.ndarray]:
    """The momentum of which the next one, b1 m + ..., has a share of what was lost."""
    momentum = arrays[Momenta.state]
    # Without a decay a momentum carries nothing over to the next step.
    lost = share / b1 * lost_by(errors, momentum.shape) if b1 else 0
    return {Momenta.state: momentum + lost}


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
        (found,) = self.exchange_all([self], [(parts, errors, dtype, state)])
        return found

    @classmethod
    def exchange_all(
        cls, parts: Sequence[Self], contents: Sequence[tuple[Any, ...]]
    ) -> list[tuple[Any, list[Any], Any]]:
        """See `AbstractParts`; all gradients go in the same messages."""
        mesh = parts[0].mesh

        def run(own: Any, errors: Any, states: Any) -> Any:
            # Parts are of the mean over all devices.
            gradients = [mesh.size * jnp.squeeze(x, DEVICE_DIM) for x in own]
            gradients = [x.astype(jnp.float32) for x in gradients]
            return cls._exchange_here(parts, gradients, errors, states)

        own, errors, dtypes, states = map(list, zip(*contents, strict=True))
        states = [
            x if x is None else one.total.unpadded(x)
            for one, x in zip(parts, states, strict=True)
        ]
        mine, whole = PartitionSpec(None, DEVICE), PartitionSpec()
        mapped = on_each_device(mesh, run, (mine, mine, whole), (whole, mine, whole))
        results = zip(parts, dtypes, *mapped(own, errors, states), strict=True)
        return [one._placed(*its) for one, *its in results]

    def _placed(
        self, dtype: Any, total: Any, errors: Sequence[Any], state: Any
    ) -> tuple[Any, list[Any], Any]:
        """What `exchange` returns, of whole arrays."""
        constrained = jax.lax.with_sharding_constraint
        pairs = zip(errors, self.errors, strict=True)
        errors = [constrained(error, layout.device) for error, layout in pairs]
        total = cut(constrained(total.astype(dtype), self.total.device), self.total)
        return total, errors, state if state is None else cut(state, self.total)

    @classmethod
    def _exchange_here(
        cls,
        parts: Sequence[Self],
        gradients: Sequence[Any],
        errors: Sequence[Any],
        states: Sequence[Any],
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The gradients that all devices take, the new errors of this one, and the new
        states of all.

        Args:
            gradients: of this device, as if its examples were all.
        """
        means, new = averaged(parts[0].mesh.size, gradients, errors)
        return means, new, states


@dataclass(frozen=True)
class MomentumParts(SignedParts):
    """Parts that lead to the mean of the momenta by signs.

    Attributes:
        b1: the decay of the momentum.
    """

    b1: float
    state = Momenta.state

    @classmethod
    def _exchange_here(
        cls,
        parts: Sequence[Self],
        gradients: Sequence[Any],
        errors: Sequence[Any],
        states: Sequence[Any],
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        b1 = parts[0].b1
        pairs = zip(states, gradients, strict=True)
        own = [b1 * state + (1 - b1) * gradient for state, gradient in pairs]
        new, lost = averaged(parts[0].mesh.size, own, errors)
        # At stage 1 an update has a part of the momentum, and all is needed next time.
        changes = zip(new, states, strict=True)
        return [(after - b1 * m) / (1 - b1) for after, m in changes], lost, new


def averaged(
    count: int, own: Sequence[Any], errors: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[list[Any]]]:
    """Means over devices by signs, and the new errors; inside `shard_map`.

    The signs of all leaves go in one message and their scales in another, both ways.

    Args:
        count: the number of devices.
        own: an array of each leaf, of this device.
        errors: of each leaf; those after the first two stay.
    """
    sent = [
        jnp.pad(x.reshape(-1), (0, lost[0].size - x.size)) + lost[0].reshape(-1)
        for x, lost in zip(own, errors, strict=True)
    ]
    scales = [_root_mean_square(x) for x in sent]
    signs = [jnp.packbits((x >= 0).reshape(count, -1), axis=-1) for x in sent]
    received = jax.lax.all_to_all(jnp.concatenate(signs, 1), DEVICE, 0, 0, tiled=True)
    ends = np.cumsum([x.shape[1] for x in signs])[:-1]
    received = jnp.split(received, ends, axis=1)
    factors = jax.lax.all_gather(jnp.stack(scales), DEVICE) / count
    averages = [
        (_unpacked(x) * factors[:, i, None]).sum(0) + errors[i][AVERAGES].reshape(-1)
        for i, x in enumerate(received)
    ]
    again = [_root_mean_square(x) for x in averages]
    packed = jnp.concatenate([jnp.packbits(x >= 0) for x in averages])
    all_signs = jnp.split(jax.lax.all_gather(packed, DEVICE), ends, axis=1)
    all_scales = jax.lax.all_gather(jnp.stack(again), DEVICE)
    means, new = [], []
    for i, x in enumerate(own):
        mean = (_unpacked(all_signs[i]) * all_scales[:, i, None]).reshape(-1)
        means.append(mean[: x.size].reshape(x.shape))
        worker, server, *others = errors[i]
        lost = sent[i] - scales[i] * _sign(sent[i])
        lost_again = averages[i] - again[i] * _sign(averages[i])
        both = lost.reshape(worker.shape), lost_again.reshape(server.shape)
        new.append([*both, *others])
    return means, new


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
