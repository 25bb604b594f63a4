"""An optax transform as two flat programs: its initial state, and its update."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zinf.core.jaxpr import Graph, abstract, flatten, trace
from zinf.core.jaxpr.compat import Var, literal
from zinf.core.optim.apart import NO_GROUPS, NormGroups, clip_apart
from zinf.core.optim.average import AVERAGES
from zinf.core.optim.clipping import peel_clipping
from zinf.core.optim.conditional import split_conditionals
from zinf.core.optim.coupling import dependencies, refuse_accumulation
from zinf.core.problem.source import key_path, named_leaves


@dataclass(frozen=True)
class Transform:
    """A traced transform.

    `init` maps the trainable parameters to the state; `update` maps gradients, state,
    parameters, the loss and the norms of `norm_groups` (`invars` in this order) to
    updates and the new state. State
    arrays are in optax's flattening order; random keys among them are kept as their
    data, so that all arrays are plain numbers. The loss is a float32 scalar, the
    `value=` of optax's transforms with extra arguments.

    Attributes:
        clip_bounds: bounds of the leading `optax.clip_by_global_norm`, which was taken
            off `update`: its gradients are clipped already.
        averages: numbers of the state arrays that are averages of weights
            (`zinf.with_ema`).
        norm_groups: the leaves whose norms `update` takes after the loss, to clip their
            gradients.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    states: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    init: Graph
    update: Graph
    clip_bounds: tuple[float, ...] = ()
    averages: frozenset[int] = frozenset()
    norm_groups: NormGroups = NO_GROUPS

    def update_inputs(self) -> tuple[tuple[Var, ...], ...]:
        """The gradients, states and parameters among the inputs of `update`."""
        invars, first, last = self.update.invars, len(self.leaves), len(self.states)
        states, masters = invars[first : first + last], invars[first + last :]
        return invars[:first], states, masters[:first]

    @property
    def of_step(self) -> tuple[Var, ...]:
        """The inputs of `update` that belong to no leaf: the loss, then norms."""
        return self.update.invars[2 * len(self.leaves) + len(self.states) :]

    @property
    def loss(self) -> Var:
        return self.of_step[0]


def trace_transform(
    tx: optax.GradientTransformation,
    params: Any,
    trainable: Collection[str] | None,
) -> Transform:
    """Traces `tx.init` and `tx.update` over the trainable leaves.

    Frozen leaves are `optax.MaskedNode()` in the trees that `tx` sees, as inside
    `optax.masked(tx, ...)`: masks and labels keep the structure of the whole tree.

    Raises:
        ValueError: see `zinf.core.optim.separate`.
    """
    named = named_leaves(params)
    unknown = set(trainable or ()) - set(named)
    assert not unknown, f"trainable names leaves that do not exist: {unknown}"
    leaves = {
        path: abstract(leaf)
        for path, leaf in named.items()
        if trainable is None or path in trainable
    }
    structure = jax.tree.structure(params)
    tree = structure.unflatten([leaves.get(p, optax.MaskedNode()) for p in named])

    implementations: dict[int, Any] = {}

    def init(params: Any) -> Any:
        state = tx.init(params)
        for k, array in enumerate(jax.tree.leaves(state)):
            if _is_key(array):
                implementations[k] = jax.random.key_impl(array)
        return jax.tree.map(_plain, state)

    takes_loss = _takes_loss(tx)

    def update(grads: Any, state: Any, params: Any, loss: Any) -> Any:
        arrays, structure = jax.tree.flatten(state)
        for k, implementation in implementations.items():
            arrays[k] = jax.random.wrap_key_data(arrays[k], impl=implementation)
        extra = {"value": loss} if takes_loss else {}
        updates, state = tx.update(grads, structure.unflatten(arrays), params, **extra)
        return updates, jax.tree.map(_plain, state)

    closed_init, state = trace(init, tree)
    refuse_accumulation(tx, state)
    closed_update, results = _trace_update(update, tree, state)
    _check_structure(results, (tree, state))
    pairs = jax.tree_util.tree_flatten_with_path(state)[0]
    traced = Transform(
        leaves=leaves,
        states=tuple((key_path(path), abstract(x)) for path, x in pairs),
        init=_inline_scalars(flatten(closed_init)),
        update=flatten(closed_update),
        averages=_averages(state),
    )
    grads, _, masters = traced.update_inputs()
    leaf_bits = {v: 1 << i for vs in (grads, masters) for i, v in enumerate(vs)}
    update = _inline_scalars(split_conditionals(traced.update, leaf_bits))
    found = dependencies(update, leaf_bits)
    update, bounds = peel_clipping(update, grads, found)
    update, numbers = clip_apart(update, grads, leaf_bits)
    paths = list(leaves)
    groups = NormGroups(tuple(frozenset(paths[i] for i in each) for each in numbers))
    return replace(traced, update=update, clip_bounds=bounds, norm_groups=groups)


def _averages(state: Any) -> frozenset[int]:
    """The numbers of the state arrays that `zinf.with_ema` keeps as averages."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AVERAGES))
    first, found = 0, set[int]()
    for node in nodes:
        count = 1
        if isinstance(node, AVERAGES):
            _, average = node
            count = len(jax.tree.leaves(node))
            num_averages = len(jax.tree.leaves(average))
            found.update(range(first + count - num_averages, first + count))
        first += count
    return frozenset(found)


def _takes_loss(tx: optax.GradientTransformation) -> bool:
    """Whether `tx.update` may be called with `value=`."""
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return False
    arguments = signature(tx.update).parameters
    kinds = {argument.kind for argument in arguments.values()}
    return "value" in arguments or Parameter.VAR_KEYWORD in kinds


def _trace_update(update: Any, tree: Any, state: Any) -> tuple[Any, Any]:
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        return trace(update, tree, state, tree, loss)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"The optimizer needs more than gradients, state, parameters and the loss: "
            f"{error}. zinf gives `value=`, the loss of the step, and nothing else: a "
            "line search evaluates the loss at other parameters, for which there is no "
            "room. Choose an optimizer without one, such as optax.adamw."
        ) from error


def _check_structure(found: Any, wanted: Any) -> None:
    """The update must return trees of the structure, shapes and dtypes it was given."""
    names = "updates", "state"
    for name, new, old in zip(names, found, wanted, strict=True):
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(
                f"`tx.update` returned {name} of another structure than it was given: "
                f"{jax.tree.structure(new)} instead of {jax.tree.structure(old)}."
            )
    news, olds = named_leaves(found[1]), named_leaves(wanted[1])
    for path, old in olds.items():
        new = news[path]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"`tx.update` changes the state {path!r} from {old.dtype}{old.shape} "
                f"to {new.dtype}{new.shape}. Fix its dtype in the transform (for optax "
                "moments: `mu_dtype`, `accumulator_dtype`)."
            )


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _plain(value: Any) -> Any:
    return jax.random.key_data(value) if _is_key(value) else value


def _inline_scalars(graph: Graph) -> Graph:
    """Scalars that the transform closed over become literals, as Python numbers are."""
    scalars = {
        v: literal(x)
        for v, x in graph.consts.items()
        if v.aval.shape == () and not _is_key(x)
    }
    if not scalars:
        return graph

    consts = {v: x for v, x in graph.consts.items() if v not in scalars}
    return replace(graph.reading(scalars), consts=consts)
