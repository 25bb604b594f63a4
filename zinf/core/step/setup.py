"""What all programs of one problem are planned from, and for which machine.

Everything here follows from shapes. No parameter is made and no store is opened, so the
same code also answers "does it fit" for a machine that is not there.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.jaxpr.chosen import tracing_on_demand
from zinf.core.machine.resources import Resources
from zinf.core.optim.clipping import Clipping
from zinf.core.optim.separate import Separated
from zinf.core.plan import (
    Arrangement,
    InfeasibleError,
    Plan,
    Rates,
    Shortage,
    build_placed,
)
from zinf.core.problem.problem import Problem
from zinf.core.problem.source import Source
from zinf.core.problem.weighted import LossWeight, split_weight
from zinf.core.process.uncollected import uncollected
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.segment import named_leaves, trace_loss
from zinf.core.segment.rows import read_by_row
from zinf.core.sharding import (
    AxisRule,
    Layouts,
    batch_dims,
    batch_share,
    persistent_layouts,
)
from zinf.core.sharding.axes import divided_dims
from zinf.core.sharding.axes.convolution import has_groups, without_uneven_groups
from zinf.core.sharding.mesh import local_devices
from zinf.core.step.arrays import array_specs
from zinf.core.step.attention import AttentionRows
from zinf.core.step.batch import batch_spec, check_rows
from zinf.core.step.step_weight import StepWeight
from zinf.core.step.whole.frame import Frame
from zinf.core.topology import Topology, out_of_memory
from zinf.distributed import AbstractGroup, Alone


@dataclass(frozen=True)
class AtRest:
    """The tiers where the arrays of an earlier step rest, and how they are cut.

    Attributes:
        is_in_stacks: whether they rest as an offloaded step has them.
    """

    homes: Mapping[ArrayId, Tier]
    layouts: Layouts
    is_in_stacks: bool = False


@dataclass(frozen=True)
class StepRequest:
    """A training step to plan, for one shape of microbatch.

    Attributes:
        batch: shapes and dtypes of one microbatch.
        source: the loss of a microbatch, without its weight.
        layouts: the table of persistent arrays.
        homes: the tiers where they rest already; None places them.
        weight: computes what the losses of a step are divided by; None if that is the
            number of microbatches.
    """

    batch: Any
    source: Source
    layouts: Layouts
    homes: Mapping[ArrayId, Tier] | None
    weight: StepWeight | None

    def frame(self, setup: "Setup") -> Frame:
        """The frame of a step of one executable: all that it computes."""
        return Frame(
            setup.without_groups if self.source.had_groups else setup.problem,
            setup.separated,
            self.batch,
            setup.key,
            setup.config.num_microbatches,
            setup.clipping,
            self.layouts,
        )


@dataclass(frozen=True)
class Setup:
    """A problem with its optimizer, config, devices and processes.

    Attributes:
        rule: how arrays are sharded, and on which mesh.
        key: shape and dtype of the random key, or None.
        attention: chooses how attentions are computed, and says so.
        group: the processes that make the same plan. Each measures its budgets and
            rates, and all plan with the lowest.
        topology: the machine of the mesh; None for this machine.
        build_placed: arranges a step whose arrays have no homes yet; a test may give
            another function than `zinf.core.plan.build_placed`.
    """

    problem: Problem
    separated: Separated
    config: Config
    rule: AxisRule
    key: jax.ShapeDtypeStruct | None
    attention: AttentionRows
    group: AbstractGroup = Alone()
    topology: Topology | None = None
    build_placed: Callable[..., Arrangement] = build_placed

    # Batches.

    def batch_spec(self, batch: Any) -> Any:
        """Shapes and dtypes of one microbatch of all processes.

        Args:
            batch: this process's part of a batch.
        """
        return batch_spec(batch, self.config.num_microbatches, self.num_shares)

    @cached_property
    def batch_share(self) -> tuple[int, int]:
        """(index, count): which of the parts of a batch this process gives."""
        return batch_share(self.rule.mesh)

    @property
    def num_shares(self) -> int:
        """Number of parts into which the processes divide a batch."""
        return self.batch_share[1]

    def check_batch(self, batch: Any) -> None:
        """Raise if this process's part of a training batch has the wrong size.

        Batches of evaluation may have any size.

        Raises:
            ValueError: the number of samples is not the one that the config sets.
        """
        check_rows(batch, self.config, self.num_shares)

    # The loss.

    def trace(self, batch: Any, max_bytes: int | None = None) -> Source:
        """The traced loss of one shape of microbatch, without a weight."""
        return self.traced(batch, max_bytes)[0]

    def traced(
        self, batch: Any, max_bytes: int | None = None
    ) -> tuple[Source, LossWeight | None]:
        """The traced loss of one shape of microbatch, and its weight if it has one.

        Args:
            max_bytes: rematerialized calls with more bytes of parameters are cut too.
        """
        leaves = named_leaves(batch)
        batch_dims({f"batch/{n}": x.shape for n, x in leaves.items()}, self.rule)
        return self._traced(batch, max_bytes)

    def _traced(
        self, batch: Any, max_bytes: int | None = None
    ) -> tuple[Source, LossWeight | None]:
        """`traced` for any number of examples, which devices need not divide."""
        rest = {"key": self.key, "max_remat_bytes": max_bytes or 1 << 62}

        def trace(problem: Problem) -> Source:
            given = problem.loss, problem.abstract_arguments(), batch
            return trace_loss(*given, has_aux=True, **rest)

        with tracing_on_demand(self.may_read_on_demand) as whole:
            source = trace(self.problem)
        if self.rule.mesh.size > 1 and has_groups(source.graph.equations):
            source = replace(trace(self.without_groups), had_groups=True)
        return split_weight(replace(source, whole_experts=tuple(whole)))

    @cached_property
    def without_groups(self) -> Problem:
        """The problem, of a loss whose convolutions in groups became sums if needed."""
        loss = without_uneven_groups(self.problem.loss, self.rule)
        return replace(self.problem, loss=loss)

    @property
    def may_read_on_demand(self) -> bool:
        """Whether a step may read only those frozen experts that its tokens chose.

        The program is the same if the config forbids that: no bit depends on it.
        """
        return bool(self.frozen) and self.rule.mesh.size == 1

    def step_weight(self, weight: LossWeight | None, batch: Any) -> StepWeight | None:
        """The weight of a step, computed by each process from its own part."""
        if weight is None:
            return None
        if self.num_shares > 1:
            weight = self._traced(jax.tree.map(self._own_part, batch))[1]
            assert weight is not None, "the same loss has a weight for other shapes"
        num_microbatches = self.config.num_microbatches
        return StepWeight(weight, num_microbatches, self.group, self.num_shares)

    def _own_part(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.shape:
            return leaf
        rows = leaf.shape[0] // self.num_shares
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    # Updates.

    @property
    def clipping(self) -> Clipping:
        """The clipping of `gradient_clipping`, then that of the optimizer."""
        return Clipping(self.config.clip_norm, self.separated.clip_bounds)

    @property
    def waits(self) -> bool:
        """Whether updates wait for the norm of the whole gradient."""
        groups = self.separated.norm_groups
        return bool(self.clipping) or bool(groups) or self.config.may_skip

    @property
    def may_defer(self) -> bool:
        """Whether updates may be left to the next step."""
        return True

    # Arrays.

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters in the compute dtype."""
        specs = array_specs(self.problem, self.separated).items()
        return sum(spec.nbytes for array, spec in specs if array.role == Role.PARAM)

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset(self.problem.params) - self.problem.trainable

    def splittable(self, layouts: Layouts) -> frozenset[str]:
        """The leaves that may rest and be read by rows."""
        by_row = {leaf.path for leaf in self.separated.leaves if leaf.is_elementwise}
        # A leaf sharded by rows cannot be streamed by rows too: each device holds only
        # some of them.
        return frozenset(
            path
            for path in by_row | self.frozen
            if layouts.of(ArrayId(Role.PARAM, path)).has_whole_rows
        )

    def initial_leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter leaf with its path; each is made when it is asked for."""
        return self.problem.initial_leaves(local_devices(self.rule.mesh)[0])

    def layouts(self, source: Source) -> Layouts:
        """The table of persistent arrays and gradients on the mesh.

        Args:
            source: the training loss. It shows which leaves are stacked over layers,
                and which over experts.
        """
        leaves, compression = self.separated.leaves, self.rule.compression
        name = "" if compression is None else compression.state
        read = [x.named_states()[name].array(x.path) for x in leaves if name]
        return persistent_layouts(
            array_specs(self.problem, self.separated),
            self.rule,
            read=read,
            layers=read_by_row(source.graph, source.params),
            divided=divided_dims(source.graph, source.params, self.rule),
            indivisible={x.path for x in leaves if not x.is_elementwise},
            trained={x.path for x in leaves},
        )

    # The machine.

    @property
    def computes_elsewhere(self) -> bool:
        """Whether devices have memory of their own, apart from host memory.

        On the CPU both are one memory, and an offloaded step saves nothing.
        """
        return self.rule.mesh.devices.flat[0].platform != "cpu"

    def capacity(self) -> dict[Tier, int]:
        """The byte budget of each tier."""
        return dict(self.resources.capacity)

    def rates(self) -> Rates:
        """The rates that predict the times of a plan."""
        return self.resources.rates

    @cached_property
    def resources(self) -> Resources:
        return Resources(self.config, self.rule.mesh, self.group, self.topology)

    @contextmanager
    def planning(self) -> Generator[None, None, None]:
        """Run the `with` block in the jax modes of zinf's own code (`Modes.own`).

        The garbage collector is paused meanwhile.

        A compiler's out-of-memory error becomes an InfeasibleError.
        """
        try:
            with self.problem.modes.own(), uncollected():
                yield
        except jax.errors.JaxRuntimeError as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> Exception:
        """A compiler's out-of-memory error as an InfeasibleError; others unchanged."""
        found = out_of_memory(error)
        if found is None:
            return error
        what = "an executable, as its compiler says,"
        short = Shortage(found.available_bytes, found.needed_bytes, what)
        return InfeasibleError({Tier.DEVICE: short}, self.capacity())

    def agree_on(self, plan: Plan, name: str) -> None:
        """Raise unless all processes have made the same plan.

        Processes that began collectives in different orders would deadlock.
        """
        if self.group.count > 1:
            listed = "\n".join(map(repr, plan.instructions))
            self.group.agree({name: sha256(listed.encode()).hexdigest()})
