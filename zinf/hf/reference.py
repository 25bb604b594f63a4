"""A frozen copy of a model beside the one in training: what it was when it began.

Both are engines of one process, and the budgets hold for both together: the reference
is placed first, and the model in training gets what it leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.machine.beside import in_own_folders, within
from zinf.core.machine.resources import Resources
from zinf.core.plan import InfeasibleError, Shortage, show_bytes
from zinf.core.program import Tier
from zinf.distributed import Alone
from zinf.hf.engine import ModelEngine, open_model
from zinf.hf.model import Model

# Of the budgets of device and host, the most that the reference may hold; training
# needs several times the bytes of the weights.
SHARE = 4


@dataclass(frozen=True)
class Reference:
    """The weights of a model's files on tiers of their own. `close` frees them.

    Attributes:
        held_bytes: the most that it holds while it scores, by tier.
        budgets: of both engines.
    """

    engine: ModelEngine
    temperature: float
    num_microbatches: int
    held_bytes: Mapping[Tier, int]
    budgets: Mapping[Tier, int]

    def __call__(self, batch: Mapping[str, Any]) -> np.ndarray:
        """Log-probabilities of tokens, float32 (rows, tokens - 1)."""
        return _scores(self.engine, batch, self.temperature, self.num_microbatches)

    def brief(self) -> str:
        """The bytes that the reference holds, in a line."""
        held = [f"{show_bytes(n)} of {t}" for t, n in self.held_bytes.items() if n]
        return f"reference: {self.engine.model.name}, holds {', '.join(held)}"

    def beside(self, config: Config) -> Config:
        """The config of the model in training, with the budgets that this leaves.

        Raises:
            InfeasibleError: it leaves nothing.
        """
        short = {
            tier: Shortage(self.budgets[tier], self.held_bytes[tier], "the reference")
            for tier in (Tier.DEVICE, Tier.HOST)
            if self.held_bytes[tier] >= self.budgets[tier]
        }
        if short:
            raise InfeasibleError(short, self.budgets)
        left = {t: max(1, n - self.held_bytes[t]) for t, n in self.budgets.items()}
        return within(config, left)

    def close(self) -> None:
        self.engine.close()


def open_reference(
    model: Model, config: Config, mesh: Mesh, *, rows: int, length: int
) -> Reference:
    """The reference of a config, with the weights of the model's files.

    Args:
        rows, length: shape of the batches that it scores.

    Raises:
        InfeasibleError: it does not fit its share of the budgets.
    """
    budgets = Resources(config, mesh, Alone()).capacity
    most = {
        tier: n if tier is Tier.NVME else max(1, n // SHARE)
        for tier, n in budgets.items()
    }
    own = within(in_own_folders(config), most)
    temperature, count = config.grpo.temperature, config.num_microbatches
    try:
        engine = open_model(model, own, rows=rows, length=length)
    except InfeasibleError as error:
        reason = f"This is the reference, which may have 1/{SHARE} of each budget."
        raise error.because([reason]) from None
    zeros = np.zeros((rows, length), np.int32)
    _scores(engine, {"input_ids": zeros, "labels": zeros}, temperature, count)
    peaks = engine.plan.peak_bytes
    held = {t: max(peaks[t], engine.stores.peak_bytes(t)) for t in Tier}
    return Reference(engine, temperature, count, held, budgets)


def _scores(
    engine: ModelEngine, batch: Mapping[str, Any], temperature: float, count: int
) -> np.ndarray:
    scored = {name: batch[name] for name in ("input_ids", "labels")}
    return engine.log_probabilities(
        scored, temperature=temperature, num_microbatches=count
    )
