"""The fused step: forward, backward and update as one jitted, donated executable.

It runs the same operations as the streamed step, with the same separated updates, so
the two agree up to the rounding of XLA's fusions. On a mesh it is one program for all
devices: sharded parameters are gathered for each pass that reads them, and gradients
are sharded like the optimizer state before the update.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.optim.clipping import Clipping
from zinf.core.optim.decision import judge
from zinf.core.optim.separate import Separated
from zinf.core.optim.squares import root
from zinf.core.optim.update import update_function
from zinf.core.problem.problem import Problem
from zinf.core.problem.source import named_leaves
from zinf.core.problem.weighted import WEIGHT
from zinf.core.program import ArrayId, Role
from zinf.core.sharding import Layouts, as_cut, batch_layouts, cut, gather
from zinf.core.sharding.mesh import SEQ, replicated
from zinf.core.step.sums import sum_dtype, sum_squares
from zinf.core.topology import compile_for

Arrays = Mapping[ArrayId, Any]


@dataclass(frozen=True)
class FusedProgram:
    """The compiled step.

    `step(values, batch, keys, scalars, loss_scale, weight) -> (values, outputs)`.
    `values` are all persistent arrays in the order of `arrays` (donated). `batch` and
    `keys` have a leading microbatch dim. `weight` is what the sum of the microbatches'
    losses is divided by. `outputs` are `losses`, `judged` (what `judge` returns) and
    `extra` (the loss function's other outputs, by microbatch). A step whose losses or
    gradient are not finite changes no array.

    `scalars` are the step values. If the optimizer reads the loss, or clips some leaves
    apart, they are its shared state instead, and `outputs["shared"]` is the shared
    state of the next step.
    """

    step: jax.stages.Compiled
    arrays: tuple[ArrayId, ...]
    workspace_bytes: int
    flops: int


def compile_fused(
    problem: Problem,
    separated: Separated,
    batch: Any,
    *,
    key: jax.ShapeDtypeStruct | None,
    num_microbatches: int,
    clipping: Clipping,
    layouts: Layouts,
) -> FusedProgram:
    """Compiles the fused step for one mesh and shape of microbatch."""
    updates = _leaf_updates(problem, separated, layouts)
    trained = [leaf.path for leaf in separated.leaves]

    own_parts = {p: layouts.own_part(ArrayId(Role.GRADIENT, p)) for p in trained}
    specs = {
        array: jax.ShapeDtypeStruct(entry.layout.padded, entry.spec.dtype)
        for array, entry in layouts.arrays.items()
    }
    ids = tuple(specs)

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
        grads, losses, extra = _accumulate(
            problem, trained, params, batch, keys, seed, num_microbatches, layouts
        )
        for path, part in own_parts.items():
            if part is not None:
                grads[path] = as_cut(grads[path], part.device)
        judged = judge(
            losses,
            sum_squares(list(grads.values())),
            clipping=clipping,
            loss_scale=loss_scale,
            xp=jnp,
        )
        _, factor, is_finite = judged
        shared, step_values = [], scalars
        if separated.reads_step:
            loss = jnp.sum(losses.astype(jnp.float32)) / weight
            # As each update takes its gradient: multiplied by the factor.
            norms = [
                (root(sum_squares([grads[p] for p in sorted(group)]), jnp) * factor)
                for group in separated.norm_groups.paths
            ]
            norms = [norm.astype(jnp.float32) for norm in norms]
            shared, step_values = separated.advance(scalars, loss, norms)
        new = dict(arrays)
        for update in updates:
            new.update(update(arrays, grads, factor, step_values))
        kept = [jnp.where(is_finite, new[a], arrays[a]) for a in ids]
        outputs = {"losses": losses, "judged": judged, "extra": extra}
        return kept, {**outputs, "shared": shared}

    scalars = separated.step_value_specs
    if separated.reads_step:
        scalars = separated.shared_specs
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    inputs = (
        stacked_specs(batch, num_microbatches),
        stacked_specs(key, num_microbatches),
    )
    arguments = list(specs.values()), *inputs, list(scalars), scale, scale
    everywhere = replicated(layouts.mesh)
    forms = [layouts.of(array).device for array in ids]
    shardings = forms, batch_shardings(batch, layouts), *[everywhere] * 4
    placed = placed_specs(arguments, shardings)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(forms, everywhere))
    compiled = compile_for(layouts.mesh, jitted.lower(*placed))
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not say how much memory it needs"
    workspace = memory.temp_size_in_bytes + memory.output_size_in_bytes
    workspace -= memory.alias_size_in_bytes
    workspace += sum(map(device_bytes, jax.tree.leaves(placed[1:])))
    cost = compiled.cost_analysis() or {}
    return FusedProgram(compiled, ids, workspace, int(cost.get("flops", 0)))


def fused_evaluation(problem: Problem, layouts: Layouts) -> Callable:
    """`(params, batches, keys) -> losses`, for parameters of a fused step."""
    forms = [layouts.of(ArrayId(Role.PARAM, p)) for p in problem.params]

    def evaluate(params: Sequence[Any], batches: Any, keys: Any) -> Any:
        wholes = [gather(x, form) for x, form in zip(params, forms, strict=True)]
        return problem.evaluation(wholes, batches, keys)

    everywhere = replicated(layouts.mesh)
    return jax.jit(evaluate, out_shardings=everywhere)


def batch_shardings(batch: Any, layouts: Layouts) -> Any:
    """The shardings of stacked microbatches.

    Args:
        batch: shapes of one microbatch.

    Raises:
        ValueError: a microbatch cannot be divided among the devices.
    """
    shapes = {f"batch/{n}": leaf.shape for n, leaf in named_leaves(batch).items()}
    leaves = [
        NamedSharding(layouts.mesh, PartitionSpec(None, *layout.device.spec))
        for layout in batch_layouts(shapes, layouts.rule).values()
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _accumulate(
    problem: Problem,
    trained: Sequence[str],
    params: "OrderedDict[str, Any]",
    batch: Any,
    keys: Any,
    seed: Any,
    num_microbatches: int,
    layouts: Layouts,
) -> tuple[dict[str, Any], Any, Any]:
    """`(gradients, losses, extra)` of all microbatches.

    Gradients are summed in the order of the microbatches; losses and the other outputs
    are stacked.

    Args:
        seed: the cotangent of each loss.
    """
    forms = {p: layouts.of(ArrayId(Role.PARAM, p)) for p in params}
    gradient_forms = {p: layouts.of(ArrayId(Role.GRADIENT, p)) for p in trained}

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
    if num_microbatches == 1:
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


def _leaf_updates(
    problem: Problem, separated: Separated, layouts: Layouts
) -> list[Callable]:
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

        def update(
            arrays: Arrays,
            grads: Mapping[str, Any],
            factor: Any,
            step_values: Sequence[Any],
            leaf: Any = leaf,
            shared: Any = shared,
            function: Callable = function,
            operands: Sequence[ArrayId] = (master, *states),
            results: Sequence[ArrayId] = tuple(results),
        ) -> dict[ArrayId, Any]:
            mine = [step_values[k] for k in leaf.step_values]
            own, *state = [arrays[a] for a in operands]
            grad = grads[leaf.path]
            new = function(factor, mine, shared.hoisted, grad, own, state)
            return dict(zip(results, new, strict=True))

        functions.append(update)
    return functions


def stacked_specs(tree: Any, num_microbatches: int) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_microbatches, *x.shape), x.dtype), tree
    )


def placed_specs(arguments: Any, shardings: Any) -> Any:
    """Abstract arguments with shardings; `shardings` is a pytree prefix of them."""
    spread = jax.tree.map(
        lambda sharding, tree: jax.tree.map(lambda _: sharding, tree),
        shardings,
        arguments,
        is_leaf=lambda x: isinstance(x, NamedSharding),
    )
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        arguments,
        spread,
    )


def device_bytes(argument: jax.ShapeDtypeStruct) -> int:
    """Bytes of an argument on one device."""
    assert argument.sharding is not None
    shape = argument.sharding.shard_shape(argument.shape)
    return prod(shape) * argument.dtype.itemsize
