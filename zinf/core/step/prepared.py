"""The interface of training steps that are planned and compiled."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from zinf.core.config import Config
from zinf.core.memory import Stores, open_stores
from zinf.core.plan import Instruction, Plan, Rates
from zinf.core.sharding import Layouts
from zinf.core.step.run.runner import AbstractRunner
from zinf.core.step.setup import Setup
from zinf.core.step.step_weight import StepWeight

# The rates of this machine, for the work of a streamed step.
Measure = Callable[[Any, Setup, Any], Rates]


@dataclass(frozen=True, kw_only=True)
class AbstractPrepared(ABC):
    """A planned and compiled training step for one shape of microbatch.

    Attributes:
        layouts: the table of the arrays that the step names.
        weight: computes what losses are divided by; None: the number of microbatches.
        experts: which experts a streamed step reads, and why: a sentence, or empty.
    """

    plan: Plan
    layouts: Layouts
    weight: StepWeight | None
    experts: str = ""

    def with_reason(self, why: str) -> Self:
        """The step with a plan that says why it runs this way."""
        return replace(self, plan=replace(self.plan, why=why))

    @abstractmethod
    def runner(
        self, setup: Setup, stores: Stores, spec: Any, before_step: Callable[[], None]
    ) -> AbstractRunner:
        """A runner of the step for batches of one shape.

        Args:
            spec: shapes and dtypes of one microbatch.
            before_step: waits until a save no longer reads the arrays. A step that
                waits for each array that it changes does not call it.
        """

    @abstractmethod
    def updating(self, setup: Setup) -> "AbstractPrepared":
        """The updates from sums of gradients, as a step of an empty batch.

        Args:
            setup: that of the optimizer.

        Raises:
            InfeasibleError: they do not fit.
            NotImplementedError: such a step adds to no sums.
        """

    @abstractmethod
    def executables(self) -> Iterator[tuple[Instruction, Any, int | None]]:
        """Each run of an executable in a step.

        Yields:
            the instruction, the executable, and the bytes that the plan counts for its
            arguments and results on one device; None if they are the compiler's.
        """

    def open_stores(self, setup: Setup, **options: Any) -> Stores:
        """Empty stores with the capacities that the step was planned for.

        Args:
            options: arguments of `zinf.core.memory.open_stores`, before the step's.

        Raises:
            NotImplementedError, ValueError: the host memory cannot be as
                `memory.pinned` asks (`zinf.core.memory.host.pages`).
        """
        return open_stores(
            list(setup.rule.mesh.devices.flat),
            capacity_bytes=self.plan.capacity_bytes,
            **{**self.store_options(setup), **options},
        )

    def store_options(self, setup: Setup) -> dict[str, Any]:
        """Arguments of `open_stores`, besides devices and budgets."""
        return {}

    def warning(self, config: Config) -> str | None:
        """A setting of the config that has no effect on the step, or None."""
        return None

    def retimed(self, setup: Setup, measure: Measure, batch: Any) -> Self:
        """The fastest form of the step by measured rates; arrays at rest stay.

        Args:
            batch: shapes and dtypes of one microbatch.
        """
        return self

    @property
    def in_parts(self) -> frozenset[str]:
        """The leaves whose gradients are parts until devices exchange them."""
        return frozenset(self.layouts.parts)

    @property
    def tiled(self) -> str:
        """Lists what runs in parts because the device cannot hold it whole."""
        return ""
