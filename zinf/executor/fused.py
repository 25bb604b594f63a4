"""The fused step: forward, backward and update as one jitted, donated executable.

It computes what the streamed step computes, with the same separated updates, so the two
agree up to the rounding that XLA's fusions choose.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zinf.executor.decision import CLIP_EPSILON
from zinf.optim.separate import Separated
from zinf.optim.update import update_function
from zinf.program import ArrayId
from zinf.segment.problem import Problem

Arrays = Mapping[ArrayId, Any]


@dataclass(frozen=True)
class FusedProgram:
    """The compiled step.

    `step(values, batch, keys, step_values, loss_scale) -> (values, outputs)`, where
    `values` are all persistent arrays in the order of `arrays` (donated), `batch` and
    `keys` have a leading microbatch dim, and `outputs` are `losses`, `grad_norm`,
    `is_finite` and `extra` (the loss function's other outputs, by microbatch). A step
    that is not finite changes no array.
    """

    step: Callable
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
    clip_norm: float | None,
    device: jax.Device,
) -> FusedProgram:
    """Compiles the fused step for one device and shape of microbatch."""
    updates = _leaf_updates(problem, separated)
    trained = [leaf.path for leaf in separated.leaves]

    specs = _array_specs(problem, separated)
    ids = tuple(specs)

    def step(
        values: Sequence[Any],
        batch: Any,
        keys: Any,
        step_values: Sequence[Any],
        loss_scale: Any,
    ) -> tuple[list[Any], Mapping[str, Any]]:
        arrays = dict(zip(ids, values, strict=True))
        params = OrderedDict((p, arrays[ArrayId("param", p)]) for p in problem.params)
        grads, losses, extra = _accumulate(
            problem, trained, params, batch, keys, loss_scale, num_microbatches
        )
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()]
        total = jnp.sum(jnp.stack(squares)) if squares else jnp.float32(0)
        norm = jnp.sqrt(total) / loss_scale
        is_finite = jnp.isfinite(norm) & jnp.all(jnp.isfinite(losses))
        factor = 1.0 / loss_scale
        if clip_norm is not None:
            factor = factor * jnp.minimum(1.0, clip_norm / (norm + CLIP_EPSILON))
        new = dict(arrays)
        for update in updates:
            new.update(update(arrays, grads, factor, step_values))
        kept = [jnp.where(is_finite, new[a], arrays[a]) for a in ids]
        outputs = {"losses": losses, "grad_norm": norm, "is_finite": is_finite}
        return kept, {**outputs, "extra": extra}

    steps = list(separated.step_value_specs)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    inputs = _stacked(batch, num_microbatches), _stacked(key, num_microbatches)
    arguments = list(specs.values()), *inputs, steps, scale
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    compiled = jax.jit(step, donate_argnums=0).lower(*placed).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not say how much memory it needs"
    workspace = memory.temp_size_in_bytes + memory.output_size_in_bytes
    workspace -= memory.alias_size_in_bytes
    workspace += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(placed[1:]))
    cost = compiled.cost_analysis() or {}
    return FusedProgram(compiled, ids, workspace, int(cost.get("flops", 0)))


def _accumulate(
    problem: Problem,
    trained: Sequence[str],
    params: "OrderedDict[str, Any]",
    batch: Any,
    keys: Any,
    loss_scale: Any,
    num_microbatches: int,
) -> tuple[dict[str, Any], Any, Any]:
    """Gradients summed over microbatches in order, losses and other outputs stacked."""

    def scaled_loss(values: Mapping[str, Any], microbatch: Any, key: Any) -> Any:
        arguments = OrderedDict((p, values.get(p, x)) for p, x in params.items())
        rest = () if key is None else (key,)
        loss, extra = problem.loss(arguments, microbatch, *rest)
        seed = (loss_scale / num_microbatches).astype(loss.dtype)
        return loss * seed, (loss, extra)

    gradient = jax.value_and_grad(scaled_loss, has_aux=True)
    trainables = {p: params[p] for p in trained}
    if num_microbatches == 1:
        single = jax.tree.map(lambda x: x[0], (batch, keys))
        (_, (loss, extra)), grads = gradient(trainables, *single)
        return grads, loss[None], jax.tree.map(lambda x: jnp.asarray(x)[None], extra)

    def body(total: Any, microbatch: Any) -> tuple[Any, Any]:
        (_, (loss, extra)), grads = gradient(trainables, *microbatch)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return total, (loss, extra)

    zeros = {p: jnp.zeros(x.shape, jnp.float32) for p, x in trainables.items()}
    grads, (losses, extra) = jax.lax.scan(body, zeros, (batch, keys))
    return grads, losses, extra


def _leaf_updates(problem: Problem, separated: Separated) -> list[Callable]:
    """For each trained leaf, a function from all arrays to its new ones."""
    whole = [(i, leaf.spec.shape) for i, leaf in enumerate(separated.leaves)]
    functions = []
    for leaf, shared in zip(separated.leaves, separated.bodies(whole), strict=True):
        spec = problem.params[leaf.path]
        copy_dtype = spec.compute.dtype if spec.has_master else None
        function = update_function(shared.body, copy_dtype)
        master = ArrayId("master" if spec.has_master else "param", leaf.path)
        states = [ArrayId(s.role, leaf.path) for s in leaf.states]
        results = [master, *states]
        results += [ArrayId("param", leaf.path)] if spec.has_master else []

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


def _array_specs(
    problem: Problem, separated: Separated
) -> dict[ArrayId, jax.ShapeDtypeStruct]:
    arrays: dict[ArrayId, jax.ShapeDtypeStruct] = {}
    for path, spec in problem.params.items():
        arrays[ArrayId("param", path)] = spec.compute
        if spec.has_master:
            arrays[ArrayId("master", path)] = spec.master
    for leaf in separated.leaves:
        for state in leaf.states:
            arrays[ArrayId(state.role, leaf.path)] = state.spec
    return arrays


def _stacked(tree: Any, num_microbatches: int) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_microbatches, *x.shape), x.dtype), tree
    )
