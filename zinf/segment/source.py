"""Traces a loss function to a flat graph whose inputs have names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.jax_modes import traceback_of_user
from zinf.jaxpr import Graph, flatten, trace, variables
from zinf.jaxpr.compat import Equation, Var, open_jaxpr
from zinf.program import KEY
from zinf.segment.order import variable_bytes

# A loop that reads or writes a mutable array from outside has these effects too.
REF_EFFECTS = {
    "InternalMutableArrayEffect",
    "ReadEffect",
    "WriteEffect",
    "AccumEffect",
}


def key_path(path: Any) -> str:
    """The name of a leaf, such as "blocks/0/mlp/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by key path, in flattening order."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {key_path(path) or "value": leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        names = [key_path(path) for path, _ in pairs]
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(
            f"Two leaves of the tree have the same key path: {', '.join(twice)}. "
            "Rename one: zinf stores every array under its path."
        )
    return named


@dataclass(frozen=True)
class Source:
    """A traced loss: its graph, and what each input variable and output is.

    `params` are named by key path, `batch` by "batch/<key path>" (and "key"). The
    first output of the graph is the loss, the rest the flattened auxiliary outputs.
    """

    graph: Graph
    params: Mapping[Var, str]
    batch: Mapping[Var, str]
    aux_structure: Any


def trace_loss(
    loss_fn: Callable,
    params: Any,
    batch: Any,
    *,
    key: Any = None,
    has_aux: bool = False,
    max_remat_bytes: int,
) -> Source:
    """The flat graph of `loss_fn(params, batch[, key])` on abstract arguments.

    Args:
        params, batch, key: pytrees of `jax.ShapeDtypeStruct` (one microbatch).
        max_remat_bytes: a `jax.checkpoint` that reads more parameter bytes than this
            is inlined; the cuts around its parts recompute as it would have.

    Raises:
        ValueError: the loss is not one floating-point number.
        NotImplementedError: an equation has an ordered or input-output effect, which
            would happen once more when the backward pass recomputes its segment.
    """

    def function(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        result = loss_fn(params, batch, *rest)
        loss, aux = result if has_aux else (result, None)
        _check_loss(loss)
        return jnp.asarray(loss), aux

    arguments = (params, batch) if key is None else (params, batch, key)
    try:
        closed, (_, aux) = trace(function, *arguments)
    except WrongResult as error:
        # A new error, without the frames and notes of the trace.
        raise WrongResult(str(error)) from None
    except Exception as error:
        given = ", ".join(f"{n} {_brief(x)}" for n, x in named_leaves(batch).items())
        error.add_note(
            f"loss_fn raised this when zinf traced it with the batch {given or 'None'}."
        )
        error.__traceback__ = traceback_of_user(error)
        raise
    invars = open_jaxpr(closed)[0].invars
    names = named_leaves(params)
    batch_names = [f"batch/{n}" for n in named_leaves(batch)]
    batch_names += [] if key is None else [KEY]
    param_vars = dict(zip(invars, names, strict=False))
    batch_vars = dict(zip(invars[len(names) :], batch_names, strict=True))
    param_set = set(param_vars)

    def inline_remat(equation: Equation) -> bool:
        read = [v for v in variables(equation.invars) if v in param_set]
        return sum(map(variable_bytes, read)) > max_remat_bytes

    graph = flatten(closed, inline_remat=inline_remat, stacked=tuple(param_vars))
    _check_constants(graph)
    for equation in graph.equations:
        _check_effects(equation)
    return Source(graph, param_vars, batch_vars, jax.tree.structure(aux))


class WrongResult(ValueError):
    """The loss function returned the wrong kind of value."""


def described(value: Any) -> str:
    """What a function returned: "float32[4, 8]", or "a dict with float32[]"."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _brief(value)
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return repr(value)
    inside = ", ".join(described(x) for x in jax.tree.leaves(value)[:4])
    more = ", ..." if len(jax.tree.leaves(value)) > 4 else ""
    return f"a {type(value).__name__} with {inside or 'nothing'}{more}"


def _brief(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def check_dependence(source: Source) -> None:
    """Refuses a loss in which no parameter takes part.

    Raises:
        ValueError: the message says what is probably wrong.
    """
    read = source.graph.needed_for(source.graph.outvars[:1]).used_invars()
    if source.params.keys().isdisjoint(read):
        raise ValueError(
            "The loss depends on no parameter, so nothing can be trained. Does loss_fn "
            "use its own arguments, and not a model from outside of it?"
        )


def _check_loss(loss: Any) -> None:
    shape = getattr(loss, "shape", None)
    dtype = getattr(loss, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if shape == () and is_float:
        return
    hint = ""
    if shape is not None and shape != () and is_float:
        hint = " Take the mean or the sum of it."
    if isinstance(loss, tuple):
        hint = " If it returns (loss, aux), pass has_aux=True."
    if isinstance(loss, float):
        hint = " A number that depends on no parameter cannot be differentiated."
    raise WrongResult(
        "loss_fn must return one floating-point number; it returned "
        f"{described(loss)}.{hint}"
    )


def _check_constants(graph: Graph) -> None:
    """Refuses a value of another trace: jax calls it a leaked tracer."""
    for value in graph.consts.values():
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"loss_fn closes over {_brief(value)} of another function that jax "
                "traces or traced (a leaked tracer), which has no value. Compute it "
                "outside of jax.jit, or pass it in the batch."
            )


def _check_effects(equation: Equation) -> None:
    refused = {
        type(e).__name__: str(e)
        for e in equation.effects
        if "Debug" not in type(e).__name__
    }
    if not refused:
        return
    if not refused.keys().isdisjoint(REF_EFFECTS):
        raise NotImplementedError(
            "loss_fn makes or changes a mutable array (jax.new_ref), which zinf "
            "cannot cut into segments. Return the new value in place of it: "
            "x = x.at[i].set(y), or a carry of jax.lax.scan."
        )
    raise NotImplementedError(
        f"The loss function contains `{equation.primitive.name}` with the effect "
        f"{', '.join(refused.values())}. A segment runs again in the backward pass, so "
        "the effect would happen twice. Return the value as an auxiliary output."
    )
