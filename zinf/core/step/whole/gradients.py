"""The gradients of all microbatches, inside a fused step.

Parameters are gathered for each pass that reads them, so no device holds all of them
from the forward to the backward pass. It is otherwise if parameters are sent encoded or
gradients are exchanged as parts: then parameters are gathered once, before the
differentiated function, since rounding has no derivative and parts are found in a
program without `jax.checkpoint`. Where whole parameters do not fit, the step streams.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.jaxpr import inline_all, trace
from zinf.core.problem.weighted import WEIGHT
from zinf.core.program import ArrayId, Role
from zinf.core.segment.parts import PartialSums
from zinf.core.sharding import AbstractParts, cut, gather
from zinf.core.sharding.mesh import SEQ
from zinf.core.sharding.parts import DEVICE_DIM
from zinf.core.step.sums import sum_dtype
from zinf.core.step.whole.frame import Frame

# Leaves that an error names.
MAX_NAMED = 3

# `(microbatch, key) -> gradients, (loss, extra)`.
Gradient = Callable[[Any, Any], tuple[dict[str, Any], tuple[Any, Any]]]


def accumulated_gradients(
    frame: Frame, params: Mapping[str, Any], batch: Any, keys: Any, seed: Any
) -> tuple[dict[str, Any], Any, Any]:
    """`(gradients, losses, extra)` of all microbatches.

    Gradients are summed in the order of the microbatches; losses and the other outputs
    are stacked. Gradients in `layouts.parts` are still parts.

    Args:
        seed: the cotangent of each loss.

    Raises:
        NotImplementedError: a gradient that would be exchanged as parts is not found as
            a sum over examples in the program of the whole step.
    """
    layouts = frame.layouts
    is_encoded = layouts.rule.encoding is not None or bool(layouts.parts)
    gradient_of = _of_wholes if is_encoded else _of_shards
    gradient = gradient_of(frame, params, seed)
    zeros = partial(_zeros, frame, params)
    return over_microbatches(frame, gradient, zeros, batch, keys)


def over_microbatches(
    frame: Frame, gradient: Gradient, zeros: Callable, batch: Any, keys: Any
) -> tuple[dict[str, Any], Any, Any]:
    """See `accumulated_gradients`.

    Args:
        zeros: makes the sums before the first of several microbatches.
    """
    if frame.num_microbatches == 1:
        grads, (loss, extra) = gradient(*jax.tree.map(lambda x: x[0], (batch, keys)))
        extra = jax.tree.map(lambda x: jnp.asarray(x)[None], extra)
        return grads, loss[None], extra

    def body(total: Any, microbatch: Any) -> tuple[Any, Any]:
        grads, results = gradient(*microbatch)
        add = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return add, results

    grads, (losses, extra) = jax.lax.scan(body, zeros(), (batch, keys))
    return grads, losses, extra


def exchanged(
    frame: Frame, grads: Mapping[str, Any], arrays: Mapping[ArrayId, Any]
) -> tuple[dict[str, Any], dict[ArrayId, Any]]:
    """The gradients in their device forms, and what replaces the errors and the state
    that their exchange reads.

    Args:
        grads: as `accumulated_gradients` returns them.
        arrays: all persistent arrays, with the errors.
    """
    totals, new = dict(grads), {}
    leaves = {leaf.path: leaf for leaf in frame.separated.leaves}
    parts, contents, read = frame.layouts.parts, [], {}
    for path, one in parts.items():
        errors = [arrays[a] for a in _errors(path, one)]
        state = None
        if one.state:
            read[path] = leaves[path].named_states()[one.state].array(path)
            state = arrays[read[path]]
        contents.append((grads[path], errors, grads[path].dtype, state))
    first, *_ = *parts.values(), None
    found = [] if first is None else first.exchange_all([*parts.values()], contents)
    for (path, one), result in zip(parts.items(), found, strict=True):
        totals[path], errors, state = result
        new.update(zip(_errors(path, one), errors, strict=True))
        if path in read:
            new[read[path]] = state
    return totals, new


def _errors(path: str, parts: AbstractParts) -> list[ArrayId]:
    slots = range(len(parts.errors))
    return [ArrayId(Role.ERROR, path, slot=slot) for slot in slots]


def _zeros(frame: Frame, params: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of gradients before the first microbatch."""
    layouts, zeros = frame.layouts, {}
    for leaf in frame.separated.leaves:
        path, dtype = leaf.path, sum_dtype(params[leaf.path].dtype)
        parts = layouts.parts.get(path)
        layout = layouts.gradients[path] if parts is None else parts.layout
        zeros[path] = cut(jnp.zeros(layout.shape, dtype), layout)
    return zeros


def scaled_loss(frame: Frame, num_devices: int = 1) -> Callable:
    """`(trained params, others, seed, microbatch, key) -> scaled loss, (loss, extra)`.

    Parameters are whole.

    Args:
        num_devices: the loss is of the examples of one of so many devices, and its mean
            over them that of all examples.
    """
    problem = frame.problem

    def scaled(
        values: Mapping[str, Any],
        others: Mapping[str, Any],
        seed: Any,
        microbatch: Any,
        key: Any,
    ) -> tuple[Any, tuple[Any, Any]]:
        known = {**others, **values}
        arguments = OrderedDict((p, known[p]) for p in problem.params)
        rest = () if key is None else (key,)
        loss, extra = problem.loss(arguments, microbatch, *rest)
        if WEIGHT in extra:
            loss = loss * num_devices  # It is a sum over examples.
        extra = {name: x for name, x in extra.items() if name != WEIGHT}
        return loss * seed.astype(loss.dtype), (loss, extra)

    return scaled


def _split(
    frame: Frame, params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trained parameters, and the others."""
    trained = {leaf.path: params[leaf.path] for leaf in frame.separated.leaves}
    return trained, {p: x for p, x in params.items() if p not in trained}


def _of_shards(frame: Frame, params: Mapping[str, Any], seed: Any) -> Gradient:
    """The gradient of one microbatch, which gathers parameters in each pass."""
    layouts, loss = frame.layouts, scaled_loss(frame)
    forms = {p: layouts.of(ArrayId(Role.PARAM, p)) for p in params}
    trained, others = _split(frame, params)

    def of_shards(values: Mapping[str, Any], microbatch: Any, key: Any) -> Any:
        wholes = [
            {p: gather(x, forms[p]) for p, x in some.items()}
            for some in (values, others)
        ]
        return loss(*wholes, seed, microbatch, key)

    if any(not form.is_gathered for form in forms.values()):
        # The backward pass gathers parameters again. To keep the gathered ones from the
        # forward pass would hold whole parameters on every device.
        of_shards = jax.checkpoint(of_shards, policy=_is_kept)

    def gradient(microbatch: Any, key: Any) -> Any:
        run = jax.value_and_grad(of_shards, has_aux=True)
        (_, results), grads = run(trained, microbatch, key)
        return {p: cut(g, layouts.gradients[p]) for p, g in grads.items()}, results

    return gradient


def _of_wholes(frame: Frame, params: Mapping[str, Any], seed: Any) -> Gradient:
    """The gradient of one microbatch, of parameters that are gathered once."""
    layouts, loss = frame.layouts, scaled_loss(frame)
    wholes = {
        p: gather(x, layouts.of(ArrayId(Role.PARAM, p))) for p, x in params.items()
    }
    trained, others = _split(frame, wholes)

    def run(*arguments: Any) -> Any:
        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(*arguments)
        return grads, results

    def gradient(microbatch: Any, key: Any) -> Any:
        arguments = trained, others, seed, microbatch, key
        in_parts, grads, results = _in_parts(frame, run, arguments)
        held = {
            p: jnp.moveaxis(g, 0, DEVICE_DIM)
            if p in in_parts
            else cut(g, layouts.gradients[p])
            for p, g in grads.items()
        }
        return held, results

    return gradient


def _in_parts(
    frame: Frame, run: Callable, arguments: tuple[Any, ...]
) -> tuple[set[str], dict[str, Any], Any]:
    """The paths of gradients that are parts, (devices, ...); gradients, and results.

    Args:
        run: `arguments -> gradients, results`, with the arguments of `scaled_loss`.
    """
    layouts = frame.layouts
    closed, shapes = trace(run, *arguments)
    graph = inline_all(closed)
    trained, others, seed, microbatch, _ = arguments
    first = len(jax.tree.leaves((trained, others, seed)))
    by_example = graph.invars[first : first + len(jax.tree.leaves(microbatch))]
    seeds = {v: 0 for v in by_example if v.aval.ndim}
    # jax flattens a dict in the order of its keys.
    paths = sorted(trained)
    wanted = [n for n, path in enumerate(paths) if path in layouts.parts]
    sums = PartialSums(graph, seeds, wanted, layouts.mesh.size)
    missing = [paths[n] for n in wanted if n not in sums.numbers]
    if missing:
        raise NotImplementedError(
            f"the gradients of {len(missing)} leaves ({', '.join(missing[:MAX_NAMED])}"
            f"{', ...' if len(missing) > MAX_NAMED else ''}) are no sums over examples "
            "in the program of a whole step, for instance because a loop over layers "
            "makes them, so no parts of them can be exchanged. Call layers one by one, "
            "or, with zero_quantized_gradients, stream: a streamed step unrolls loops."
        )
    spec = PartitionSpec(layouts.mesh.axis_names)
    leaves = sums.run(jax.tree.leaves(arguments), NamedSharding(layouts.mesh, spec))
    grads, results = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return {paths[n] for n in sums.numbers}, grads, results


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that saves all results but gathered parameters.

    A sharding constraint gathers a parameter, and a slice removes its padding. The
    constraints of `sharding.axes.sequence` cut values along `seq`; those are saved.
    """
    if primitive.name == "sharding_constraint":
        return any(SEQ in (entry or ()) for entry in params["sharding"].spec)
    return primitive.name != "slice"
