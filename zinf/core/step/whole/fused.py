"""The fused step: forward, backward and update as one jitted, donated executable.

It runs the same operations as the streamed step, with the same separated updates, so
the two agree up to the rounding of XLA's fusions. On a mesh it is one program for all
devices: sharded parameters are gathered for each pass that reads them, and gradients
are sharded like the optimizer state before the update.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.optim.separate import LeafUpdate, Separated
from zinf.core.optim.squares import root
from zinf.core.optim.update import update_function
from zinf.core.problem.problem import Problem
from zinf.core.problem.weighted import WEIGHT
from zinf.core.program import ArrayId, Role
from zinf.core.sharding import Layouts, as_cut, cut, gather
from zinf.core.sharding.mesh import SEQ, replicated
from zinf.core.step.sums import sum_dtype, sum_squares
from zinf.core.step.whole.frame import Frame
from zinf.core.topology import memory

Arrays = Mapping[ArrayId, Any]


@dataclass(frozen=True)
class FusedProgram:
    """The compiled step; its only group of arrays is all of `arrays` (`Frame`)."""

    step: jax.stages.Compiled
    arrays: tuple[ArrayId, ...]
    workspace_bytes: int
    flops: int


def compile_fused(frame: Frame) -> FusedProgram:
    """Compiles the fused step for one mesh and shape of microbatch."""
    problem, separated, layouts = frame.problem, frame.separated, frame.layouts
    updates = _leaf_updates(problem, separated, layouts)
    own_parts = {
        leaf.path: layouts.own_part(ArrayId(Role.GRADIENT, leaf.path))
        for leaf in separated.leaves
    }
    ids = tuple(layouts.arrays)

    def step(
        values: Sequence[Any],
        batch: Any,
        keys: Any,
        scalars: Sequence[Any],
        loss_scale: Any,
        weight: Any,
    ) -> tuple[list[Any], Mapping[str, Any]]:
        arrays = dict(zip(ids, values, strict=True))
        params = OrderedDict(
            (p, arrays[ArrayId(Role.PARAM, p)]) for p in problem.params
        )
        seed = loss_scale / weight
        grads, losses, extra = _accumulate(frame, params, batch, keys, seed)
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
        shared, step_values = frame.step_values(scalars, losses, weight, norms)
        new = dict(arrays)
        for update in updates:
            new.update(update(arrays, grads, factor, step_values))
        kept = [jnp.where(is_finite, new[a], arrays[a]) for a in ids]
        outputs = {"losses": losses, "judged": judged, "extra": extra}
        return kept, {**outputs, "shared": shared}

    forms = [layouts.of(array).device for array in ids]
    values = [
        jax.ShapeDtypeStruct(entry.layout.padded, entry.spec.dtype, sharding=form)
        for entry, form in zip(layouts.arrays.values(), forms, strict=True)
    ]
    compiled = frame.compile(step, [values], forms)
    found = memory(compiled)
    workspace = found.temp_bytes + found.output_bytes - found.alias_bytes
    cost = compiled.cost_analysis() or {}
    flops = int(cost.get("flops", 0))
    return FusedProgram(compiled, ids, workspace + frame.input_bytes, flops)


def fused_evaluation(problem: Problem, layouts: Layouts) -> Callable:
    """`(params, batches, keys) -> losses`, for parameters of a fused step."""
    forms = [layouts.of(ArrayId(Role.PARAM, p)) for p in problem.params]

    def evaluate(params: Sequence[Any], batches: Any, keys: Any) -> Any:
        wholes = [gather(x, form) for x, form in zip(params, forms, strict=True)]
        return problem.evaluation(wholes, batches, keys)

    everywhere = replicated(layouts.mesh)
    return jax.jit(evaluate, out_shardings=everywhere)


def _accumulate(
    frame: Frame, params: "OrderedDict[str, Any]", batch: Any, keys: Any, seed: Any
) -> tuple[dict[str, Any], Any, Any]:
    """`(gradients, losses, extra)` of all microbatches.

    Gradients are summed in the order of the microbatches; losses and the other outputs
    are stacked.

    Args:
        seed: the cotangent of each loss.
    """
    problem, layouts = frame.problem, frame.layouts
    trained = [leaf.path for leaf in frame.separated.leaves]
    forms = {p: layouts.of(ArrayId(Role.PARAM, p)) for p in params}
    gradient_forms = {p: layouts.gradients[p] for p in trained}

    def scaled_loss(values: Mapping[str, Any], microbatch: Any, key: Any) -> Any:
        arguments = OrderedDict(
            (p, gather(values.get(p, x), forms[p])) for p, x in params.items()
        )
        rest = () if key is None else (key,)
        loss, extra = problem.loss(arguments, microbatch, *rest)
        extra = {name: x for name, x in extra.items() if name != WEIGHT}
        return loss * seed.astype(loss.dtype), (loss, extra)

    if any(not form.is_gathered for form in forms.values()):
        # The backward pass gathers parameters again. To keep the gathered ones from the
        # forward pass would hold whole parameters on every device.
        scaled_loss = jax.checkpoint(scaled_loss, policy=_is_kept)

    def gradient(values: Mapping[str, Any], *rest: Any) -> tuple[Any, dict[str, Any]]:
        result, grads = jax.value_and_grad(scaled_loss, has_aux=True)(values, *rest)
        return result, {p: cut(g, gradient_forms[p]) for p, g in grads.items()}

    trainables = {p: params[p] for p in trained}
    if frame.num_microbatches == 1:
        single = jax.tree.map(lambda x: x[0], (batch, keys))
        (_, (loss, extra)), grads = gradient(trainables, *single)
        return grads, loss[None], jax.tree.map(lambda x: jnp.asarray(x)[None], extra)

    def body(total: Any, microbatch: Any) -> tuple[Any, Any]:
        (_, (loss, extra)), grads = gradient(trainables, *microbatch)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return total, (loss, extra)

    zeros = {
        p: cut(jnp.zeros(x.shape, sum_dtype(x.dtype)), gradient_forms[p])
        for p, x in trainables.items()
    }
    grads, (losses, extra) = jax.lax.scan(body, zeros, (batch, keys))
    return grads, losses, extra


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that saves all results but gathered parameters.

    A sharding constraint gathers a parameter, and a slice removes its padding. The
    constraints of `sharding.axes.sequence` cut values along `seq`; those are saved.
    """
    if primitive.name == "sharding_constraint":
        return any(SEQ in (entry or ()) for entry in params["sharding"].spec)
    return primitive.name != "slice"


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
        copy, copy_dtype = spec.copy(), spec.compute.dtype if spec.has_master else None
        function = update_function(shared.body, copy_dtype)
        states = [s.array(leaf.path) for s in leaf.states]
        results = [master, *states, *([] if copy is None else [copy])]
        update = _LeafUpdate(leaf, shared, function, (master, *states), tuple(results))
        functions.append(update)
    return functions
