"""The fused step: forward, backward and update as one jitted, donated executable.

It runs the same operations as the streamed step, with the same separated updates, so
the two agree up to the rounding of XLA's fusions. On a mesh it is one program for all
devices: sharded parameters are gathered for each pass that reads them, and gradients
are sharded like the optimizer state before the update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.optim.separate import LeafUpdate, Separated
from zinf.core.optim.squares import root
from zinf.core.optim.update import update_function
from zinf.core.problem.problem import Problem
from zinf.core.program import ArrayId, Role
from zinf.core.sharding import Layouts, Phase, as_cut, gather, spread
from zinf.core.sharding.mesh import replicated
from zinf.core.step.sums import sum_squares
from zinf.core.step.whole.frame import Frame
from zinf.core.step.whole.gradients import accumulated_gradients, exchanged
from zinf.core.step.whole.local import local_step
from zinf.core.topology import flops_of, memory

Arrays = Mapping[ArrayId, Any]


@dataclass(frozen=True)
class FusedProgram:
    """The compiled step; its only group of arrays is all of `arrays` (`Frame`).

    Attributes:
        others: programs of the same arrays, each for the steps of another phase.
    """

    step: jax.stages.Compiled
    arrays: tuple[ArrayId, ...]
    workspace_bytes: int
    flops: int
    others: Mapping[Phase, jax.stages.Compiled] = field(default_factory=dict)

    def of(self, phase: Phase) -> jax.stages.Compiled:
        """The program of the steps of a phase."""
        return self.others.get(phase, self.step)


def compile_fused(frame: Frame, *, is_of_sums: bool = False) -> FusedProgram:
    """Compiles the fused step for one mesh and shape of microbatch.

    If an optimizer sends signs in some steps, there is a program for each phase; that
    of its first phase is `FusedProgram.step`.

    Args:
        is_of_sums: gradients are not computed: they are the sums at rest (`Role.SUM`).
    """
    compression = frame.layouts.rule.compression
    if compression is None:
        return _compile(frame, _step(frame, _sums if is_of_sums else _of_batch))
    programs = {}
    for phase in compression.phases:
        its = replace(frame, layouts=frame.layouts.in_phase(phase))
        step = local_step(its, phase) if phase.is_local else _step(its, _of_batch)
        programs[phase] = _compile(its, step)
    first, *rest = compression.phases
    return replace(
        programs[first],
        others={phase: programs[phase].step for phase in rest},
        workspace_bytes=max(one.workspace_bytes for one in programs.values()),
    )


def _of_batch(
    frame: Frame, arrays: Arrays, batch: Any, keys: Any, seed: Any
) -> tuple[dict[str, Any], Any, Any, Arrays]:
    """`(gradients, losses, extra, replaced)` of a batch; see `exchanged`."""
    params = {p: arrays[ArrayId(Role.PARAM, p)] for p in frame.problem.params}
    grads, losses, extra = accumulated_gradients(frame, params, batch, keys, seed)
    grads, replaced = exchanged(frame, grads, arrays)
    return grads, losses, extra, replaced


def _sums(
    frame: Frame, arrays: Arrays, batch: Any, keys: Any, seed: Any
) -> tuple[dict[str, Any], Any, Any, Arrays]:
    """The sums at rest, as `_of_batch` returns gradients."""
    del batch, keys, seed
    params = frame.problem.params
    grads = {x.path: arrays[params[x.path].sum] for x in frame.separated.leaves}
    return grads, jnp.zeros((1,), jnp.float32), {}, {}


def _compile(frame: Frame, step: Callable) -> FusedProgram:
    layouts = frame.layouts
    forms = [layouts.of(array).device for array in layouts.arrays]
    values = [
        jax.ShapeDtypeStruct(entry.layout.padded, entry.spec.dtype, sharding=form)
        for entry, form in zip(layouts.arrays.values(), forms, strict=True)
    ]
    compiled = frame.compile(step, [values], forms)
    found = memory(compiled)
    workspace = found.temp_bytes + found.output_bytes - found.alias_bytes
    device_bytes = workspace + frame.input_bytes
    return FusedProgram(
        compiled, tuple(layouts.arrays), device_bytes, flops_of(compiled)
    )


def _step(frame: Frame, gradients: Callable) -> Callable:
    """The step of a frame, to be compiled, in which all devices do the same updates.

    Args:
        gradients: `_of_batch`, or `_sums`.
    """
    problem, separated, layouts = frame.problem, frame.separated, frame.layouts
    updates = _leaf_updates(problem, separated, layouts)
    own_parts = {
        leaf.path: layouts.own_part(ArrayId(Role.GRADIENT, leaf.path))
        for leaf in separated.leaves
    }
    ids = tuple(layouts.arrays)
    compression = layouts.rule.compression
    num_rates = 0 if compression is None else compression.num_rates

    def step(
        values: Sequence[Any],
        batch: Any,
        keys: Any,
        scalars: Sequence[Any],
        loss_scale: Any,
        weight: Any,
    ) -> tuple[list[Any], Mapping[str, Any]]:
        arrays = dict(zip(ids, values, strict=True))
        given = arrays, batch, keys, loss_scale / weight
        grads, losses, extra, replaced = gradients(frame, *given)
        for path, part in own_parts.items():
            if part is not None:
                grads[path] = as_cut(grads[path], part.device)
        judged = frame.judged(losses, sum_squares(list(grads.values())), loss_scale)
        _, factor, is_finite = judged
        # Each update multiplies its gradient by the factor, so the norm has it too.
        norms = [
            (root(sum_squares([grads[p] for p in sorted(group)]), jnp) * factor)
            for group in separated.norm_groups.paths
        ]
        norms = [norm.astype(jnp.float32) for norm in norms]
        own = scalars[: len(scalars) - num_rates]
        shared, step_values = frame.step_values(own, losses, weight, norms)
        new = dict(arrays)
        for update in updates:
            made = update(arrays, grads, factor, step_values)
            new.update({a: spread(x, layouts.of(a)) for a, x in made.items()})
        new |= replaced
        kept = [jnp.where(is_finite, new[a], arrays[a]) for a in ids]
        outputs = {"losses": losses, "judged": judged, "extra": extra}
        return kept, {**outputs, "shared": shared}

    return step


def fused_evaluation(problem: Problem, layouts: Layouts) -> Callable:
    """`(params, batches, keys) -> losses`, for parameters of a fused step."""
    forms = [layouts.of(ArrayId(Role.PARAM, p)) for p in problem.params]

    def evaluate(params: Sequence[Any], batches: Any, keys: Any) -> Any:
        wholes = [gather(x, form) for x, form in zip(params, forms, strict=True)]
        return problem.evaluation(wholes, batches, keys)

    everywhere = replicated(layouts.mesh)
    return jax.jit(evaluate, out_shardings=everywhere)


@dataclass(frozen=True)
class _LeafUpdate:
    """The update of one leaf, from all arrays to the leaf's new arrays.

    Attributes:
        operands: its master and states.
        results: what replaces them, and the compute copy if it has one.
    """

    leaf: LeafUpdate
    shared: Any
    function: Callable
    operands: Sequence[ArrayId]
    results: Sequence[ArrayId]

    def __call__(
        self,
        arrays: Arrays,
        grads: Mapping[str, Any],
        factor: Any,
        step_values: Sequence[Any],
    ) -> dict[ArrayId, Any]:
        mine = [step_values[k] for k in self.leaf.step_values]
        own, *state = [arrays[a] for a in self.operands]
        grad, hoisted = grads[self.leaf.path], self.shared.hoisted
        new = self.function(factor, mine, hoisted, grad, own, state)
        return dict(zip(self.results, new, strict=True))


def _leaf_updates(
    problem: Problem, separated: Separated, layouts: Layouts
) -> list[_LeafUpdate]:
    """For each trained leaf, a function from all arrays to the leaf's new arrays."""
    masters = [problem.params[leaf.path].updated() for leaf in separated.leaves]
    shapes = [(i, layouts.of(master).padded) for i, master in enumerate(masters)]
    functions = []
    for leaf, master, shared in zip(
        separated.leaves, masters, separated.bodies(shapes), strict=True
    ):
        spec = problem.params[leaf.path]
        copy = spec.copy()
        copy_dtype = None if copy is None else spec.compute.dtype
        rest = {"replaces": separated.replaces}
        function = update_function(shared.body, copy_dtype, **rest)
        states = [s.array(leaf.path) for s in leaf.states]
        results = [master, *states, *([] if copy is None else [copy])]
        update = _LeafUpdate(leaf, shared, function, (master, *states), tuple(results))
        functions.append(update)
    return functions
