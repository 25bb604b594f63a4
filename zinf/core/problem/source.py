"""Traces a function to a flat graph whose inputs have names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Graph, flatten, trace, variables
from zinf.core.jaxpr.compat import Equation, Var, open_jaxpr
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.keys import to_words
from zinf.core.process.jax_modes import traceback_of_user
from zinf.core.program import KEY

# The types of the leaves that a function may return.
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
NUM_LISTED = 5
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
    """A traced function: its graph, and what each input variable and output is.

    `params` are named by key path, `batch` by "batch/<key path>" (and "key"). The
    outputs of the graph are the flattened outputs of the function, whose pytree is
    `structure`. The outputs of a loss are `(loss, aux)`.

    Attributes:
        whole_experts: number of experts, choices of a token, and tokens of each layer
            whose tokens choose about all experts, if that was asked when it was traced.
        had_groups: whether it was traced again for its convolutions in groups
            (`sharding.axes.convolution`).
    """

    graph: Graph
    params: Mapping[Var, str]
    batch: Mapping[Var, str]
    structure: Any
    whole_experts: tuple[tuple[int, int, int], ...] = ()
    had_groups: bool = False


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
        NotImplementedError: an equation has a side effect other than printing.
    """
    rest = {"key": key, "max_remat_bytes": max_remat_bytes, "name": "loss_fn"}
    return trace_function(checked_loss(loss_fn, has_aux), params, batch, **rest)


def checked_loss(loss_fn: Callable, has_aux: bool) -> Callable:
    """A loss that returns `(loss, aux)`, and raises if the loss is none."""

    def function(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        result = loss_fn(params, batch, *rest)
        loss, aux = result if has_aux else (result, None)
        _check_loss(loss)
        return jnp.asarray(loss), aux

    return function


def trace_function(
    function: Callable,
    params: Any,
    batch: Any,
    *,
    key: Any = None,
    max_remat_bytes: int,
    name: str,
) -> Source:
    """The flat graph of `function(params, batch[, key])` on abstract arguments.

    Args:
        params, batch, key, max_remat_bytes: see `trace_loss`.
        name: what errors call the function.

    Raises:
        ValueError: the function returns nothing, or something that is no array.
        NotImplementedError: an equation has a side effect other than printing.
    """

    def checked(*arguments: Any) -> Any:
        return _outputs(function(*arguments), name)

    arguments = (params, batch) if key is None else (params, batch, key)
    with noted(name, params, batch):
        closed, outputs = trace(checked, *arguments)
    invars = open_jaxpr(closed)[0].invars
    leaves = named_leaves(params)
    batch_names = [f"batch/{n}" for n in named_leaves(batch)]
    batch_names += [] if key is None else [KEY]
    param_vars = dict(zip(invars, leaves, strict=False))
    batch_vars = dict(zip(invars[len(leaves) :], batch_names, strict=True))
    param_set = set(param_vars)

    def inline_remat(equation: Equation) -> bool:
        read = [v for v in variables(equation.invars) if v in param_set]
        return sum(map(variable_bytes, read)) > max_remat_bytes

    graph = flatten(closed, inline_remat=inline_remat, stacked=tuple(param_vars))
    _check_constants(graph, name)
    for equation in graph.equations:
        _check_effects(equation, name)
    return Source(graph, param_vars, batch_vars, jax.tree.structure(outputs))


class noted:
    """A context that adds to errors of tracing a function what it was called with.

    A class, because `contextmanager` puts the frames back that are cut from errors.

    Args:
        name: what errors call the function.
        params, batch: shapes and dtypes.
    """

    def __init__(self, name: str, params: Any, batch: Any) -> None:
        self._name, self._params, self._batch = name, params, batch

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, frames: object
    ) -> None:
        if isinstance(error, WrongResult):
            # A new error, without the frames and notes of the trace.
            raise WrongResult(str(error)) from None
        if not isinstance(error, Exception):
            return
        leaves = named_leaves(self._batch).items()
        given = ", ".join(f"{n} {_brief(x)}" for n, x in leaves)
        error.add_note(
            f"{self._name} raised this when zinf traced it with the batch "
            f"{given or 'None'}."
        )
        if isinstance(error, (KeyError, AttributeError, IndexError)):
            error.add_note(f"The parameters are {listed(named_leaves(self._params))}.")
        if isinstance(error, (TypeError, ValueError)):
            for note in _of_other_precision(self._params, self._batch):
                error.add_note(note)
        error.__traceback__ = traceback_of_user(error)


class WrongResult(ValueError):
    """A function of the user returned the wrong kind of value."""


def _outputs(tree: Any, name: str) -> Any:
    """The outputs of a function as arrays; random keys as their words."""
    leaves = named_leaves(tree)
    if not leaves:
        raise WrongResult(
            f"{name} returned {described(tree)}, in which there is no array. Return an "
            "array, or a pytree of arrays."
        )
    for path, leaf in leaves.items():
        if not isinstance(leaf, NUMBERS):
            raise WrongResult(
                f"{name} returned {path!r} as {described(leaf)}, which is no array of "
                "numbers. Leave it out."
            )
    return jax.tree.map(lambda x: to_words(jnp.asarray(x)), tree)


def described(value: Any) -> str:
    """What a function returned: "float32[4, 8]", or "a dict with float32[]"."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _brief(value)
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return repr(value)
    inside = ", ".join(described(x) for x in jax.tree.leaves(value)[:4])
    more = ", ..." if len(jax.tree.leaves(value)) > 4 else ""
    return f"a {type(value).__name__} with {inside or 'nothing'}{more}"


def listed(paths: Iterable[str]) -> str:
    """The first key paths, and how many there are if these are not all."""
    names = list(paths)
    more = f", ... ({len(names)} in all)" if len(names) > NUM_LISTED else ""
    return ", ".join(names[:NUM_LISTED]) + more


def _of_other_precision(params: Any, batch: Any) -> Iterator[str]:
    """What to change if 16-bit parameters met the batch's floats of another dtype."""
    halves = {"bfloat16": "bf16", "float16": "fp16"}
    found = {str(x.dtype) for x in jax.tree.leaves(params)} & halves.keys()
    for dtype in sorted(found):
        for name, leaf in named_leaves(batch).items():
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
                yield (
                    f"With {halves[dtype]} enabled the function gets its parameters in "
                    f"{dtype}, and the batch as it is given: {name} is {leaf.dtype}. "
                    f"If the dtypes must agree, cast it first: x.astype({dtype!r})."
                )
                return


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


def _check_constants(graph: Graph, name: str) -> None:
    """Refuses a value of another trace: jax calls it a leaked tracer."""
    for value in graph.consts.values():
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"{name} closes over {_brief(value)} of another function that jax "
                "traces or traced (a leaked tracer), which has no value. Compute it "
                "outside of jax.jit, or pass it in the batch."
            )


def _check_effects(equation: Equation, name: str) -> None:
    refused = {
        type(e).__name__: str(e)
        for e in equation.effects
        if "Debug" not in type(e).__name__
    }
    if not refused:
        return
    if not refused.keys().isdisjoint(REF_EFFECTS):
        raise NotImplementedError(
            f"{name} makes or changes a mutable array (jax.new_ref), which zinf "
            "cannot cut into segments. Return the new value in place of it: "
            "x = x.at[i].set(y), or a carry of jax.lax.scan."
        )
    raise NotImplementedError(
        f"{name} contains `{equation.primitive.name}` with the effect "
        f"{', '.join(refused.values())}. zinf runs a function in segments, and those "
        "of a loss again in the backward pass, so the effect would happen at another "
        "time, or twice. Return the value as an output; of a loss, as an auxiliary "
        "output."
    )
