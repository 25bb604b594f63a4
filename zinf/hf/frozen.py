"""Frozen models beside the one in training: the reference, and reward models.

All are engines of the same processes, and the budgets hold for all together: frozen
models are placed first, one after the other, and the model in training gets what they
leave.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.machine.beside import in_own_folders, within
from zinf.core.machine.resources import Resources
from zinf.core.memory import BudgetExceeded
from zinf.core.plan import InfeasibleError, Shortage, show_bytes
from zinf.core.program import Tier
from zinf.core.topology import Topology
from zinf.distributed import AbstractGroup, Alone
from zinf.hf.engine import ModelEngine

ALONE = Alone()
# Of what is left of the budgets of device and host, the most that a frozen model may
# hold; training needs several times the bytes of the weights.
SHARE = 4


@dataclass(frozen=True)
class Held:
    """What a frozen model holds, of budgets that it leaves to others.

    Attributes:
        title: what it is, such as "the reference".
        name: of the model.
        held_bytes: the most that it holds while it runs, by tier.
        budgets: what was left for it and for all that is placed after it.
    """

    title: str
    name: str
    held_bytes: Mapping[Tier, int]
    budgets: Mapping[Tier, int]

    def brief(self) -> str:
        """The bytes that the model holds, in a line."""
        held = [f"{show_bytes(n)} of {t}" for t, n in self.held_bytes.items() if n]
        return f"{self.title} ({self.name}) holds {', '.join(held)}"

    def beside(self, config: Config) -> Config:
        """The config of what is placed next, with the budgets that this leaves.

        Raises:
            InfeasibleError: it leaves nothing.
        """
        short = {
            tier: Shortage(self.budgets[tier], self.held_bytes[tier], self.title)
            for tier in (Tier.DEVICE, Tier.HOST)
            if self.held_bytes[tier] >= self.budgets[tier]
        }
        if short:
            raise InfeasibleError(short, self.budgets)
        left = {t: max(1, n - self.held_bytes[t]) for t, n in self.budgets.items()}
        return within(config, left)


def in_words(placed: Sequence[Held]) -> list[str]:
    """What models hold that were placed before, a sentence each, for errors."""
    notes = [f"{held.brief()}, which is not in these budgets." for held in placed]
    return [note[0].upper() + note[1:] for note in notes]


@dataclass(frozen=True)
class Frozen(Held):
    """A frozen model that is opened: its engine trains nothing. `close` frees it."""

    engine: ModelEngine

    def close(self) -> None:
        self.engine.close()


def place(
    title: str,
    config: Config,
    mesh: Mesh,
    run: Callable[[Config], ModelEngine],
    *,
    number: int,
    output_bytes: int = 0,
    group: AbstractGroup = ALONE,
) -> Frozen:
    """A frozen model within its share of what a config has left.

    Args:
        title: see `Held`.
        run: opens the engine with a config, and runs the largest batch that it will
            ever get.
        number: of the models that are placed beside each other, from 1.
        output_bytes: of what a batch gives. On the host it may lie beside all else that
            a pass holds or not: threads free values in no fixed order.
        group: the processes that run the model together.

    Raises:
        InfeasibleError: it does not fit its share.
    """
    own, budgets = share(config, mesh, number=number, group=group)
    with within_share(title):
        engine = run(own)
    peaks = engine.plan.peak_bytes
    peaks = [max(peaks[t], engine.stores.peak_bytes(t)) for t in Tier]
    # All plan what is placed next with the same budgets.
    most = np.max(group.gather("bytes of a frozen model", peaks), axis=0)
    held = dict(zip(Tier, map(int, most), strict=True))
    held[Tier.HOST] += output_bytes
    return Frozen(title, engine.model.name, held, budgets, engine)


def share(
    config: Config,
    mesh: Mesh,
    machine: Topology | None = None,
    *,
    number: int,
    group: AbstractGroup = ALONE,
) -> tuple[Config, dict[Tier, int]]:
    """The config of a frozen model, within its share, and the budgets that are left.

    Args:
        machine: of the mesh, if nothing is run.
        number, group: see `place`.
    """
    budgets = Resources(config, mesh, group, machine).capacity
    most = {
        tier: n if tier is Tier.NVME else max(1, n // SHARE)
        for tier, n in budgets.items()
    }
    # The adapters are of the model in training.
    own = config.told().model_copy(update={"adapter": None})
    return within(in_own_folders(own, number), most), budgets


@contextmanager
def within_share(title: str) -> Generator[None, None, None]:
    """In the `with` block, errors of budgets name a frozen model and its share."""
    reason = (
        f"This is {title}, which may have 1/{SHARE} of what is left of each budget."
    )
    try:
        yield
    except InfeasibleError as error:
        raise error.because([reason]) from None
    except BudgetExceeded as error:  # A part of a weight, while it is read.
        needed = error.used_bytes + error.asked_bytes
        short = {error.tier: Shortage(error.capacity_bytes, needed, error.what)}
        budgets = {error.tier: error.capacity_bytes}
        raise InfeasibleError(short, budgets).because([reason]) from None
