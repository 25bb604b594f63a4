"""Plans training steps: cuts, compiles and arranges them within the budgets.

All decisions are made from shapes. No parameter is made and no store is opened, so the
same code also answers "does it fit" for a machine that is not there.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config import Config
from zinf.core.machine.resources import Resources
from zinf.core.memory.host.pages import check_pinned
from zinf.core.optim.clipping import Clipping
from zinf.core.optim.separate import Separated
from zinf.core.plan import (
    Arrangement,
    Choices,
    InfeasibleError,
    Plan,
    Rates,
    Resident,
    Shortage,
    StepOptions,
    build_at_home,
    build_placed,
    count_contributions,
    fused_plan,
    offloaded_plan,
    retimed,
)
from zinf.core.problem.problem import Problem
from zinf.core.problem.source import Source, check_dependence
from zinf.core.problem.weighted import LossWeight, split_weight
from zinf.core.process.uncollected import uncollected
from zinf.core.program import ArrayId, Program, Role, Tier
from zinf.core.segment import (
    Segment,
    Segmented,
    compile_segments,
    named_leaves,
    segment_loss,
    trace_loss,
)
from zinf.core.segment.rows import read_by_row
from zinf.core.sharding import (
    AxisRule,
    Dim,
    Layouts,
    batch_dims,
    num_batch_shares,
    persistent_layouts,
)
from zinf.core.sharding.axes.experts import expert_dims
from zinf.core.sharding.axes.tensor import channel_dims
from zinf.core.sharding.mesh import TENSOR, local_devices
from zinf.core.step.arrays import (
    array_specs,
    kept_off_nvme,
    make_catalog,
    residents,
    resting_pieces,
)
from zinf.core.step.attention import AttentionRows
from zinf.core.step.batch import batch_spec, check_rows
from zinf.core.step.choice import (
    FUSED,
    computes_elsewhere,
    faster,
    in_short,
    why_not_offloaded,
)
from zinf.core.step.earlier_plan import EarlierPlan, Step, earlier_plan
from zinf.core.step.exchange import segment_exchanges
from zinf.core.step.joint import Joint, grouped
from zinf.core.step.keeping import keeping_as_chosen, what_may_be_kept
from zinf.core.step.shrink import Limits, is_worth_trying, reasons, tighter
from zinf.core.step.step_weight import StepWeight
from zinf.core.step.updates import Updates, compile_program_updates
from zinf.core.step.whole.fused import FusedProgram, compile_fused
from zinf.core.step.whole.offloaded import (
    OffloadedProgram,
    check_offloadable,
    compile_offloaded,
)
from zinf.core.step.whole.sound import check_sound
from zinf.core.topology import Topology, out_of_memory
from zinf.distributed import AbstractGroup, Alone

logger = logging.getLogger(__name__)

# Why one of several steps cannot be made. The compiler's errors are of one type,
# whether memory is short or the compiler fails by itself.
CANNOT = (InfeasibleError, jax.errors.JaxRuntimeError)
Made = TypeVar("Made")

Measure = Callable[["Streamed", "Planner", Any], Rates]


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
class Compiled:
    """Compiled segments, and the layouts of all arrays that they read and write."""

    segments: tuple[Segment, ...]
    layouts: Layouts


@dataclass(frozen=True)
class Streamed:
    """A step that runs segment by segment."""

    arranged: Arrangement
    segmented: Segmented
    segments: tuple[Segment, ...]
    updates: Updates
    joint: Joint
    compute_dtype: Any
    layouts: Layouts
    limits: Limits
    weight: StepWeight | None = None
    earlier: EarlierPlan = EarlierPlan()

    @property
    def plan(self) -> Plan:
        return self.arranged.plan

    def because(self, why: str) -> "Streamed":
        """The step with a plan that says why."""
        plan = replace(self.plan, why=why)
        return replace(self, arranged=replace(self.arranged, plan=plan))


@dataclass(frozen=True)
class Fused:
    """A step that is one executable."""

    plan: Plan
    program: FusedProgram
    layouts: Layouts
    weight: StepWeight | None = None

    def because(self, why: str) -> "Fused":
        """The step with a plan that says why."""
        return replace(self, plan=replace(self.plan, why=why))


@dataclass(frozen=True)
class Offloaded:
    """A step that is one executable, with all arrays in pinned host memory."""

    plan: Plan
    program: OffloadedProgram
    layouts: Layouts
    weight: StepWeight | None = None

    def because(self, why: str) -> "Offloaded":
        """The step with a plan that says why."""
        return replace(self, plan=replace(self.plan, why=why))


@dataclass(frozen=True)
class Planner:
    """Plans steps of one problem for batches of any shape.

    Attributes:
        rule: how arrays are sharded, and on which mesh.
        key: shape and dtype of the random key, or None.
        group: the processes that make the same plan. Each measures its budgets and
            rates, and all plan with the lowest.
        topology: the machine of the mesh; None for this machine.
        measure: measures the rates of this machine for a planned step, given the shapes
            of a microbatch; None plans by the rates of `resources` alone.
        attention: chooses how attentions are computed, and says so.
        build_placed: arranges a step whose arrays have no homes yet; a test may give
            another function than `zinf.core.plan.build_placed`.
    """

    problem: Problem
    separated: Separated
    config: Config
    rule: AxisRule
    key: jax.ShapeDtypeStruct | None
    group: AbstractGroup = Alone()
    topology: Topology | None = None
    measure: Measure | None = None
    attention: AttentionRows | None = None
    build_placed: Callable[..., Arrangement] = build_placed

    def batch_spec(self, batch: Any) -> Any:
        """Shapes and dtypes of one microbatch of all processes.

        Args:
            batch: this process's part of a batch.
        """
        return batch_spec(batch, self.config.num_microbatches, self.num_shares)

    @cached_property
    def num_shares(self) -> int:
        """Number of parts into which the processes divide a batch."""
        return num_batch_shares(self.rule.mesh)

    def check_batch(self, batch: Any) -> None:
        """Raise if this process's part of a training batch has the wrong size.

        Batches of evaluation may have any size.

        Raises:
            ValueError: the number of samples is not the one that the config sets.
        """
        check_rows(batch, self.config, self.num_shares)

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters in the compute dtype."""
        specs = array_specs(self.problem, self.separated).items()
        return sum(spec.nbytes for array, spec in specs if array.role == Role.PARAM)

    def plan_batch(self, batch: Any) -> Streamed | Fused | Offloaded:
        """The plan for the whole batch of all processes; places all arrays anew."""
        check_rows(batch, self.config)
        return self.plan(batch_spec(batch, self.config.num_microbatches))

    def plan(
        self, batch: Any, at_rest: AtRest | None = None
    ) -> Streamed | Fused | Offloaded:
        """The best step that fits the budgets, the same on all processes.

        Args:
            batch: shapes and dtypes of one microbatch.
            at_rest: where arrays already rest; None chooses that.

        Raises:
            InfeasibleError: no plan fits the budgets.
        """
        with self.planning():
            # Trace before fusing too: this refuses functions that are not a loss.
            source, weight = split_weight(
                self._traced(batch, self.config.segment_max_bytes)
            )
            check_dependence(source)
            made, why = self._plan(source, batch, at_rest)
            if weight is not None:
                made = replace(made, weight=self._step_weight(weight, batch))
            if isinstance(made, Streamed) and self.measure is not None:
                made = self._timed(made, batch)
            if why:
                logger.info("execution: %s", why)
            attends = "" if self.attention is None else self.attention.sentence()
            if why or attends:
                made = made.because(f"{why} {attends}".strip())
        self.agree_on(made.plan, "plan")
        if isinstance(made, Streamed) and at_rest is None and self.group.is_first:
            arranged = made.arranged.catalog
            kept = kept_off_nvme(made.plan.homes, arranged.specs, self.config)
            if kept is not None:
                logger.warning(kept)
        return made

    @contextmanager
    def planning(self) -> Generator[None, None, None]:
        """Plans in zinf's modes of jax while the body runs.

        A compiler's out-of-memory error becomes an InfeasibleError.
        """
        try:
            with self.problem.modes.own(), uncollected():
                yield
        except jax.errors.JaxRuntimeError as error:
            raise self._refused(error) from error

    def agree_on(self, plan: Plan, name: str) -> None:
        """Raise unless all processes have made the same plan.

        Processes that began collectives in different orders would deadlock.
        """
        if self.group.count > 1:
            listed = "\n".join(map(repr, plan.instructions))
            self.group.agree({name: sha256(listed.encode()).hexdigest()})

    def _timed(self, made: "Streamed", batch: Any) -> "Streamed":
        """The step with the options that are fastest by the rates of this machine.

        Homes and residuals stay as the rates of `resources` chose them: saved residuals
        may round differently, and measured rates differ from run to run.
        """
        assert self.measure is not None
        rates = self.measure(made, self, batch)
        before, units, choices = made.arranged, made.updates.units, self.choices()
        catalog, options = replace(before.catalog, rates=rates), before.options
        step = Step(catalog, (), units, before.plan.capacity_bytes, options, choices)
        arranged = made.earlier.then(rates).arranged(
            step, lambda: retimed(before, units, rates, choices)
        )
        arranged, joint = grouped(arranged, made.updates)
        return replace(made, arranged=arranged, joint=joint)

    def _refused(self, error: Exception) -> Exception:
        """A compiler's out-of-memory error as an InfeasibleError; others unchanged."""
        found = out_of_memory(error)
        if found is None:
            return error
        what = "an executable, as its compiler says,"
        short = Shortage(found.available_bytes, found.needed_bytes, what)
        return InfeasibleError({Tier.DEVICE: short}, self.capacity())

    def _plan(
        self, source: Source, batch: Any, at_rest: AtRest | None
    ) -> tuple[Streamed | Fused | Offloaded, str]:
        """The step, and why it runs this way if `execution: auto` had a choice."""
        mode = self.config.execution
        homes = None if at_rest is None else at_rest.homes
        layouts = self.layouts(source) if at_rest is None else at_rest.layouts
        if mode == "offloaded" or (at_rest is not None and at_rest.is_in_stacks):
            return self.offload(batch, source, layouts), ""
        is_open = (
            mode == "auto" and homes is None and computes_elsewhere(self.rule.mesh)
        )
        may_fuse = mode != "streamed" and self.fits_fused(layouts, homes)
        # The fused step gathers inside the differentiated function, where an encoded
        # gather would have no derivative, and would be saved for the backward pass.
        may_fuse = may_fuse and self.rule.encoding is None
        if mode == "fused" and not may_fuse:
            raise ValueError(
                "execution is 'fused', which keeps everything on the device, but "
                "arrays are placed elsewhere by offload_param or offload_optimizer, or "
                "the state alone exceeds the device budget of "
                f"{self.capacity()[Tier.DEVICE]:,} bytes. Remove one of the two."
            )
        refused = ""
        if may_fuse:
            try:
                return self.fuse(batch, layouts), FUSED if is_open else ""
            except CANNOT as error:
                if mode == "fused" or homes is not None:
                    raise
                # That the state does not fit the device needs no words.
                if not isinstance(error, InfeasibleError):
                    refused = f"Not fused, because {self._why_not(error)}."
        if is_open:
            made, why = self._offload_or_stream(batch, source, layouts, refused)
            return made, f"{refused} {why}".strip()
        return self._last(batch, source, layouts, homes, refused), refused

    def _last(
        self,
        batch: Any,
        source: Source,
        layouts: Layouts,
        homes: Mapping[ArrayId, Tier] | None,
        refused: str,
    ) -> Streamed:
        """The streamed step, where nothing else is left to try.

        Args:
            refused: why the others were not made, for errors; empty if none was tried.
        """
        try:
            return self.stream(batch, source, layouts, homes)
        except CANNOT as error:
            if not refused:
                raise
            if isinstance(error, InfeasibleError):
                raise error.because([refused]) from None
            why_not = self._why_not(error)
            raise NotImplementedError(
                f"No form of this step can be compiled. {refused} Not streamed, "
                f"because {why_not}. Try another version of jax or another microbatch "
                "size. With execution: streamed the compiler's message is shown whole."
            ) from error

    def _why_not(self, error: Exception) -> str:
        """Why a step was not made, as the end of a sentence."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            try:
                error = self._refused(error)
            except ValueError as unknown:  # It ran out of memory, in unknown words.
                error = unknown
        return in_short(error)

    def _offload_or_stream(
        self, batch: Any, source: Source, layouts: Layouts, refused: str
    ) -> tuple[Streamed | Offloaded, str]:
        """The one of the two that is predicted to be faster, and why.

        Args:
            refused: why the step is not fused, for errors; may be empty.
        """
        offloaded, mesh = None, (self.rule, self.group.count, self.topology)
        why_not = why_not_offloaded(self.config, *mesh)
        if why_not is None:
            try:
                self._check_host_holds_state(layouts)
                offloaded = self.offload(batch, source, layouts)
            except (NotImplementedError, ValueError, *CANNOT) as error:
                why_not = self._why_not(error)
        if offloaded is None:
            refused = f"{refused} Not offloaded, because {why_not}.".strip()
            streamed = self._last(batch, source, layouts, None, refused)
            return streamed, f"Streamed; not offloaded, because {why_not}."
        try:
            streamed = self.stream(batch, source, layouts, None)
        except CANNOT as error:
            return (
                offloaded,
                f"Offloaded; not streamed, because {self._why_not(error)}.",
            )
        is_faster, why = faster(offloaded.plan, streamed.plan)
        return (offloaded if is_faster else streamed), why

    def _check_host_holds_state(self, layouts: Layouts) -> None:
        """Raise InfeasibleError if the budget of the host is less than the state.

        Compiling, which would find it too, takes minutes for a large model.
        """
        needed = sum(entry.share.nbytes for entry in layouts.arrays.values())
        capacity = self.capacity()
        if needed > capacity[Tier.HOST]:
            short = Shortage(capacity[Tier.HOST], needed, "the state")
            raise InfeasibleError({Tier.HOST: short}, capacity)

    def trace(self, batch: Any, max_bytes: int | None = None) -> Source:
        """The loss for one shape of microbatch, without its weight."""
        return split_weight(self._traced(batch, max_bytes))[0]

    def _step_weight(self, weight: LossWeight, batch: Any) -> StepWeight:
        """The weight of a step, computed by each process from its own part."""
        if self.num_shares > 1:
            own = jax.tree.map(self._own_part, batch)
            found = split_weight(self._traced(own))[1]
            assert found is not None, "the same loss has a weight for other shapes"
            weight = found
        num_microbatches = self.config.num_microbatches
        return StepWeight(weight, num_microbatches, self.group, self.num_shares)

    def _own_part(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.shape:
            return leaf
        rows = leaf.shape[0] // self.num_shares
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    def _traced(self, batch: Any, max_bytes: int | None = None) -> Source:
        leaves = named_leaves(batch)
        batch_dims({f"batch/{n}": x.shape for n, x in leaves.items()}, self.rule)
        return trace_loss(
            self.problem.loss,
            self.problem.abstract_arguments(),
            batch,
            key=self.key,
            has_aux=True,
            max_remat_bytes=max_bytes or 1 << 62,
        )

    # The fused step: everything is on the device.

    def fits_fused(
        self, layouts: Layouts, homes: Mapping[ArrayId, Tier] | None
    ) -> bool:
        if homes is not None:
            return set(homes.values()) == {Tier.DEVICE} and not any(
                a.rows for a in homes
            )
        tiers = {self.config.param_tier, self.config.optimizer_tier}
        state = layouts.device_bytes
        return tiers <= {None, Tier.DEVICE} and state <= self.capacity()[Tier.DEVICE]

    def fuse(self, batch: Any, layouts: Layouts) -> Fused:
        program = compile_fused(
            self.problem,
            self.separated,
            batch,
            key=self.key,
            num_microbatches=self.config.num_microbatches,
            clipping=self.clipping,
            layouts=layouts,
        )
        plan = fused_plan(
            dict.fromkeys(layouts.arrays, Tier.DEVICE),
            layouts.device_bytes,
            program.workspace_bytes,
            self.capacity(),
            program.flops,
            self.rates(),
        )
        return Fused(plan, program, layouts)

    # The offloaded step: everything is on the host, and the program moves it.

    def offload(self, batch: Any, source: Source, layouts: Layouts) -> Offloaded:
        check_offloadable(self.rule)
        if self.separated.norm_groups:
            raise NotImplementedError(
                "execution is 'offloaded', and the optimizer clips some parameters by "
                "a norm of their own, which offloaded steps do not take. Use "
                "execution: streamed or fused, or put optax.clip_by_global_norm first "
                "in the chain of all parameters."
            )
        segmented = self.cut(source, layouts, self.config.segment_max_bytes)
        program = self._offloaded_program(batch, segmented, layouts)
        plan = offloaded_plan(
            dict.fromkeys(resting_pieces(layouts, segmented.program), Tier.HOST),
            program.moved,
            sum(stack.nbytes for stack in program.stacks),
            {Tier.DEVICE: program.device_bytes, Tier.HOST: program.host_bytes},
            self.capacity(),
            program.flops,
            self.rates(),
        )
        if self.topology is None:
            devices = local_devices(self.rule.mesh)
            check_pinned(devices, program.host_bytes)
            if computes_elsewhere(self.rule.mesh):
                check_sound(devices[0])
        return Offloaded(plan, program, layouts)

    def _offloaded_program(
        self, batch: Any, segmented: Segmented, layouts: Layouts
    ) -> OffloadedProgram:
        """The first form that fits the device, or else the last one.

        Updates in passes have the state of a whole layer on the device, and fewer bytes
        to move. Inputs of layers that wait on the host are the last resort.
        """
        is_host = self.config.activation_tier == Tier.HOST
        forms = [
            (offloads_values, updates_in_passes)
            for offloads_values in ((True,) if is_host else (False, True))
            for updates_in_passes in ((False,) if self.waits else (True, False))
        ]
        for form in forms:
            offloads_values, updates_in_passes = form
            try:
                program = compile_offloaded(
                    self.problem,
                    self.separated,
                    segmented,
                    batch,
                    key=self.key,
                    num_microbatches=self.config.num_microbatches,
                    clipping=self.clipping,
                    layouts=layouts,
                    offloads_values=offloads_values,
                    updates_in_passes=updates_in_passes,
                )
            except jax.errors.JaxRuntimeError as error:
                # Also where the compiler fails by itself: another form is another
                # program.
                if form == forms[-1]:
                    raise
                logger.info("A form of the offloaded step is not taken: %s", error)
                continue
            is_last = form == forms[-1]
            if is_last or program.device_bytes <= self.capacity()[Tier.DEVICE]:
                return program
        raise AssertionError("no form")

    # The streamed step: segment by segment.

    def stream(
        self,
        batch: Any,
        source: Source,
        layouts: Layouts,
        homes: Mapping[ArrayId, Tier] | None,
    ) -> Streamed:
        """Cut by layer; while the plan does not fit the device, tighten the limits.

        Tighter limits make segments smaller. Weights larger than a segment may hold are
        read by tile, and segments with too large intermediate values run in blocks of
        rows.
        """
        limits = Limits(self.config.segment_max_bytes)

        def cut_to(max_bytes: int | None) -> Segmented:
            is_traced = max_bytes == limits.param_bytes
            traced = source if is_traced else self.trace(batch, max_bytes)
            return self.cut(traced, layouts, max_bytes)

        def attempt(
            segmented: Segmented, compiled: Compiled, limits: Limits
        ) -> Streamed:
            return self.stream_segments(segmented, compiled, limits, homes)

        return self.shrunk(layouts, cut_to, attempt, limits)

    def shrunk(
        self,
        layouts: Layouts,
        cut_to: Callable[[int | None], Segmented],
        attempt: Callable[[Segmented, Compiled, Limits], Made],
        limits: Limits,
    ) -> Made:
        """What `attempt` makes of the first segments that fit the device.

        Args:
            layouts: how persistent arrays are cut.
            cut_to: cuts the program into segments of at most so many parameter bytes.
            limits: the first limits that are tried.
        """
        segmented = cut_to(limits.param_bytes)
        while True:
            compiled = self.compile(segmented, layouts, limits)
            try:
                return attempt(segmented, compiled, limits)
            except InfeasibleError as error:
                before = segmented.program
                tight = tighter(limits, error, compiled.segments, before)
                if tight is None:
                    raise error.because(reasons(before, compiled.segments)) from None
                if tight.param_bytes != limits.param_bytes:
                    segmented = cut_to(tight.param_bytes)
                rest = self.capacity()[Tier.DEVICE], self.rule.mesh.size
                if not is_worth_trying(segmented.program, before, *rest):
                    found = reasons(segmented.program, compiled.segments)
                    raise error.because(found) from None
                limits = tight

    def cut(self, source: Source, layouts: Layouts, max_bytes: int | None) -> Segmented:
        return segment_loss(
            source,
            frozen=self.frozen,
            splittable=self.splittable(layouts),
            max_bytes=max_bytes,
        )

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

    def compile(
        self, segmented: Segmented, layouts: Layouts, limits: Limits
    ) -> Compiled:
        layouts = layouts.with_inputs(segmented.program)
        segments, values = compile_segments(
            segmented,
            layouts,
            limits.workspace_bytes,
            accumulates=self.accumulates(segmented.program),
        )
        return Compiled(segments, replace(layouts, values=values))

    def accumulates(self, program: Program) -> frozenset[ArrayId]:
        """The parameter arrays whose gradient is the sum of several contributions."""
        counts = count_contributions(program, self.config.num_microbatches)
        return frozenset(
            ArrayId(Role.PARAM, *key) for key, n in counts.items() if n > 1
        )

    def stream_segments(
        self,
        segmented: Segmented,
        compiled: Compiled,
        limits: Limits,
        homes: Mapping[ArrayId, Tier] | None,
    ) -> Streamed:
        segments, layouts = compiled.segments, compiled.layouts
        specs = tuple(s.spec for s in segments)
        program = replace(segmented.program, segments=specs)
        segmented = replace(segmented, program=program)
        spaces = [s.workspace() for s in segments]
        workspace = [(w.forward_bytes, w.backward_bytes) for w in spaces]
        counts = count_contributions(program, self.config.num_microbatches)
        updates = compile_program_updates(
            program,
            self.problem,
            self.separated,
            accumulates=self.accumulates(program),
            layouts=layouts,
        )
        options = StepOptions(
            num_microbatches=self.config.num_microbatches,
            updates_in_backward=not self.waits,
            value_tier=self.config.activation_tier or Tier.DEVICE,
            gradient_tier=Tier.HOST,
        )
        capacity = self.capacity()
        catalog = make_catalog(
            program,
            layouts,
            resting_pieces(layouts, program, homes),
            homes,
            workspace=workspace,
            num_contributions=counts,
            rates=self.rates(),
            exchange=segment_exchanges(segments),
            norm_classes=self.separated.norm_groups.classes,
        )
        choices = self.choices()
        if self.config.keeps_residuals:
            levels = (False, True)
            keepings = tuple(partial(what_may_be_kept, segments, x) for x in levels)
            choices = replace(choices, keepings=keepings)
        rest = updates.units, capacity, options, choices
        placed: list[Resident] = []
        if homes is not None:
            search = partial(build_at_home, catalog, *rest)
        else:
            placed = residents(catalog, self.config)
            search = partial(self.build_placed, catalog, placed, *rest)
        step, earlier = Step(catalog, placed, *rest), EarlierPlan()
        # Several processes would have to agree on whether one of them searches, and
        # what a program takes on another machine is that machine's compiler's to say.
        if self.group.count == 1 and self.topology is None:
            earlier = earlier_plan(step, segments, updates, mesh=self.rule.mesh)
        arranged, joint = grouped(earlier.arranged(step, search), updates)
        return Streamed(
            arranged,
            segmented,
            keeping_as_chosen(segments, arranged.catalog.keeping),
            updates,
            joint,
            jnp.dtype(self.config.compute_dtype),
            layouts,
            limits,
            earlier=earlier,
        )

    def choices(self) -> Choices:
        """The options that the search may choose, where the config leaves them open."""
        return Choices(
            self.tiers_from(self.config.activation_tier, Tier.DEVICE),
            self.tiers_from(None, Tier.HOST),
            self.config.persistence_bytes,
            update_tiers=(Tier.DEVICE,),
            defers=True,
            # On several devices, rows of a shard are not rows of the whole array.
            by_row=self.rule.mesh.size == 1,
        )

    def tiers_from(self, asked: Tier | None, fastest: Tier) -> tuple[Tier, ...]:
        if asked is not None:
            return (asked,)
        tiers = list(Tier)[list(Tier).index(fastest) :]
        return tuple(t for t in tiers if t != Tier.NVME or self.config.nvme_paths)

    @property
    def clipping(self) -> Clipping:
        """The clipping of `gradient_clipping`, then that of the optimizer."""
        return Clipping(self.config.clip_norm, self.separated.clip_bounds)

    @property
    def waits(self) -> bool:
        """Whether updates wait for the norm of the whole gradient."""
        groups = self.separated.norm_groups
        return bool(self.clipping) or bool(groups) or self.config.may_skip

    # Arrays and budgets.

    def initial_leaves(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter leaf with its path; each is made when it is asked for."""
        return self.problem.initial_leaves(local_devices(self.rule.mesh)[0])

    def layouts(self, source: Source) -> Layouts:
        """The layouts of persistent arrays and gradients on the mesh.

        Args:
            source: the training loss. It shows which leaves are stacked over layers,
                and which over experts.
        """
        return persistent_layouts(
            array_specs(self.problem, self.separated),
            self.rule,
            layers=read_by_row(source.graph, source.params),
            divided=self.divided(source),
            indivisible={x.path for x in self.separated.leaves if not x.is_elementwise},
        )

    def divided(self, source: Source) -> dict[str, dict[int, Dim]]:
        """The dims of leaves that axes of their own cut, by path."""
        graph, leaves = source.graph, source.params
        inside = expert_dims(graph, leaves, axis=TENSOR)
        around = channel_dims(
            graph,
            leaves,
            self.rule.size(Dim.CHANNELS),
            min_bytes=self.rule.min_bytes,
            may_be_none=bool(inside),
        )
        meanings = (
            (Dim.EXPERTS, expert_dims(graph, leaves)),
            (Dim.CHANNELS, inside),
            (Dim.CHANNELS, around),
        )
        found: dict[str, dict[int, Dim]] = {}
        for meaning, dims in meanings:
            for path, dim in dims.items():
                found.setdefault(path, {})[dim] = meaning
        return found

    def capacity(self) -> dict[Tier, int]:
        """The byte budget of each tier."""
        return dict(self.resources.capacity)

    @property
    def has_measured_rates(self) -> bool:
        """Whether plans go by rates that were measured on a machine."""
        return self.measure is not None or isinstance(self.config.rates, Path)

    def rates(self) -> Rates:
        """The rates that predict the times of a plan."""
        return self.resources.rates

    @cached_property
    def resources(self) -> Resources:
        return Resources(self.config, self.rule.mesh, self.group, self.topology)
