"""The training problem: a loss over a flat dict of arrays, for any pytree of the user.

Everything below the engine names a parameter by its key path. This module turns the
user's loss, parameters and model state into that form, and back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import from_words, in_words, is_key, to_words
from zinf.core.problem.leafwise import (
    abstract_leaves,
    initialize,
    is_function,
    leaves_of,
)
from zinf.core.problem.modes import evaluated, for_evaluation, for_training
from zinf.core.problem.results import sorted_result
from zinf.core.problem.source import (
    listed,
    named_leaves,
)
from zinf.core.problem.state_rules import rules_of
from zinf.core.problem.user_loss import UserLoss
from zinf.core.problem.weighted import weighed, with_weight
from zinf.core.process.jax_modes import Modes
from zinf.core.program import ArrayId, Role, Rows

STATE_PREFIX = "model_state/"
MASTER_DTYPE = "float32"
OVERWRITTEN = "_overwrite_with_gradient"  # a collection of variables in Flax


@dataclass(frozen=True)
class ParamSpec:
    """One leaf: as given, as stored (`master`), and as the loss sees it (`compute`).

    Typed random keys are stored as their 32-bit words, and given to the loss as keys.
    """

    path: str
    given: jax.ShapeDtypeStruct
    master: jax.ShapeDtypeStruct
    compute: jax.ShapeDtypeStruct
    is_trainable: bool

    @property
    def sum(self) -> ArrayId:
        """The sum of its gradients, if the problem has them."""
        return ArrayId(Role.SUM, self.path)

    @property
    def has_master(self) -> bool:
        """True if the master is an array of its own, besides the compute copy."""
        return self.is_trainable and self.master.dtype != self.compute.dtype

    def updated(self, rows: Rows = None) -> ArrayId:
        """The array that updates change: the master, or the parameter without one."""
        role = Role.MASTER if self.has_master else Role.PARAM
        return ArrayId(role, self.path, rows)

    def copy(self, rows: Rows = None) -> ArrayId | None:
        """The compute copy that each update makes of the master; None without one."""
        return ArrayId(Role.PARAM, self.path, rows) if self.has_master else None


@dataclass(frozen=True)
class Problem:
    """A loss over named arrays.

    Attributes:
        params: every leaf of the parameters, then of the model state, by key path.
        abstract_params: the user's parameter pytree in master dtypes (typed keys kept).
        loss: `(flat arrays, batch[, key]) -> (loss, {"aux": ..., "model_state": ...})`.
            If the user's function returns a `Weighted`, its total is the loss, and the
            second dict has its "weight" too.
        evaluation_loss: `(flat arrays, batch[, key]) -> (loss, {})`, with the weight in
            the same way; or None if it computes what `loss` does.
        modes: jax's modes, in which the user's functions are traced.
        state_paths: the leaves that the loss returns anew, in the order of
            the flattened `model_state` output.
        state_rules: for each of them, how those of microbatches become one.
        bound: turns any function of the user, `(params[, model_state], batch[, key])`,
            into one of `(flat arrays, batch[, key])`.
        loss_of: `(loss function of the user, whether it returns aux) -> loss`, for
            other losses of the same parameters.
        sums_gradients: each trained leaf has a sum of gradients (`Role.SUM`).
    """

    params: Mapping[str, ParamSpec]
    abstract_params: Any
    loss: Callable
    evaluation_loss: Callable | None
    state_paths: tuple[str, ...]
    state_rules: Mapping[str, str]
    bound: Callable[[Callable], Callable]
    loss_of: Callable[[Callable, bool], Callable]
    sums_gradients: bool
    modes: Modes
    _source: Any = field(repr=False)
    _state: Any = field(repr=False)
    _structure: Any = field(repr=False)
    _state_structure: Any = field(repr=False)

    @property
    def has_state(self) -> bool:
        """Whether functions of the user take the model state after the parameters."""
        return self._state is not None

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(p for p, spec in self.params.items() if spec.is_trainable)

    def abstract_arguments(self) -> "OrderedDict[str, jax.ShapeDtypeStruct]":
        """The first argument of `loss`, in compute dtypes."""
        return OrderedDict((p, spec.compute) for p, spec in self.params.items())

    def initial_leaves(self, device: jax.Device) -> Iterator[tuple[str, np.ndarray]]:
        """`(path, value in its master dtype)`, one leaf at a time, keys as words."""
        for path, leaf in _leaves(self._source, device):
            yield path, self._stored(path, leaf)
        if self._state is not None:
            for name, leaf in _leaves(self._state, device):
                path = STATE_PREFIX + name
                yield path, self._stored(path, leaf)

    @cached_property
    def evaluation(self) -> Callable:
        """`(arrays, batches, keys) -> losses`: a jitted forward pass a microbatch.

        `arrays` are the leaves in the order of `params`; `batches` and `keys` have a
        leading microbatch dim, and so have the losses, a `Weighted`.
        """

        loss = self.evaluation_loss or self.loss

        def evaluate(arrays: Sequence[Any], batches: Any, keys: Any) -> Any:
            flat = OrderedDict(zip(self.params, arrays, strict=True))

            def one(microbatch: tuple[Any, Any]) -> Any:
                batch, key = microbatch
                total, extra = loss(flat, batch, *([] if key is None else [key]))
                return weighed(total, extra, batch)

            return jax.lax.map(one, (batches, keys))

        return jax.jit(evaluate)

    def restore_tree(self, read: Callable[[str], np.ndarray]) -> Any:
        """The user's parameter pytree, each leaf read by its path."""
        paths = [p for p in self.params if not p.startswith(STATE_PREFIX)]
        leaves = [self._presented(p, read(p)) for p in paths]
        return jax.tree.unflatten(self._structure, leaves)

    def restore_state(self, read: Callable[[str], np.ndarray]) -> Any:
        """The model state pytree, or None if there is none."""
        if self._state is None:
            return None
        leaves = [self._presented(p, read(p)) for p in self.state_paths]
        return jax.tree.unflatten(self._state_structure, leaves)

    def _stored(self, path: str, leaf: Any) -> np.ndarray:
        spec = self.params[path]
        stored = np.asarray(to_words(leaf)).astype(spec.master.dtype, copy=False)
        # It may be the user's own array, which a store must not take over.
        stored = stored.view()
        stored.flags.writeable = False
        return stored

    def _presented(self, path: str, stored: np.ndarray) -> Any:
        return from_words(stored, self.params[path].given)


def make_problem(
    user: UserLoss,
    *,
    frozen: Sequence[str] = (),
    compute_dtype: str = MASTER_DTYPE,
    averages_microbatches: bool = False,
    num_microbatches: int = 1,
    sums_gradients: bool = False,
    modes: Modes | None = None,
) -> Problem:
    """Describes training of the user's parameters under the user's loss.

    Args:
        frozen: glob patterns over key paths; matching leaves get no gradient.
        compute_dtype: "bfloat16" or "float16" for mixed precision: trained leaves are
            kept in float32 and cast for the loss. Otherwise leaves keep their dtypes.
        averages_microbatches: a step's loss is the mean of its microbatches' means.
        num_microbatches: of a step.
        sums_gradients: see `Problem`.
        modes: those that the user's functions run in; by default those of the caller.

    Raises:
        ValueError: a leaf is not an array, or a pattern matches nothing.
        NotImplementedError: a complex leaf that is not frozen; or leaves that are
            overwritten with their gradient.
    """
    modes = Modes.current() if modes is None else modes
    params, model_state = (
        modes.of_user(x) if is_function(x) else x
        for x in (user.params, user.model_state)
    )
    abstract = abstract_leaves(params)
    leaves = named_leaves(abstract)
    _check_leaves(leaves, frozen)
    mixed = compute_dtype if compute_dtype != MASTER_DTYPE else None
    specs = {}
    for path, leaf in leaves.items():
        is_frozen = any(fnmatch(path, pattern) for pattern in frozen)
        specs[path] = _param_spec(path, leaf, not is_frozen, mixed)
    abstract_state = None if model_state is None else abstract_leaves(model_state)
    states = named_leaves(abstract_state)
    rules = rules_of(states, user.state_rules or {}, num_microbatches=num_microbatches)
    state_paths = tuple(STATE_PREFIX + name for name in states)
    for path, leaf in zip(state_paths, states.values(), strict=True):
        specs[path] = _param_spec(path, leaf, False, None)
    functions = _Functions(
        user,
        specs,
        jax.tree.structure(abstract),
        abstract_state,
        modes,
        averages_microbatches,
    )
    masters = [x if is_key(x) else specs[p].master for p, x in leaves.items()]
    return Problem(
        params=specs,
        abstract_params=jax.tree.unflatten(functions.structure, masters),
        loss=functions.loss(),
        evaluation_loss=functions.evaluation_loss(),
        state_paths=state_paths,
        state_rules={STATE_PREFIX + n: rule for n, rule in rules.items()},
        bound=functions.bound,
        loss_of=functions.loss_of,
        sums_gradients=sums_gradients,
        modes=modes,
        _source=params,
        _state=model_state,
        _structure=functions.structure,
        _state_structure=jax.tree.structure(abstract_state),
    )


@dataclass(frozen=True)
class _Functions:
    """The user's functions as functions of flat arrays.

    Attributes:
        structure: of the parameters.
        abstract_state: the model state; None if there is none.
    """

    user: UserLoss
    specs: Mapping[str, ParamSpec]
    structure: Any
    abstract_state: Any
    modes: Modes
    averages_microbatches: bool

    def trees(self, flat: Mapping[str, Any]) -> list[Any]:
        """The parameters, and the model state if there is one."""
        values = [from_words(x, self.specs[p].given) for p, x in flat.items()]
        count = self.structure.num_leaves
        found = [jax.tree.unflatten(self.structure, values[:count])]
        if self.abstract_state is not None:
            structure = jax.tree.structure(self.abstract_state)
            found.append(jax.tree.unflatten(structure, values[count:]))
        return found

    def bound(self, function: Callable) -> Callable:
        in_modes = self.modes.of_user(function)

        def on_named(flat: Mapping[str, Any], batch: Any, *key: Any) -> Any:
            return in_modes(*self.trees(flat), batch, *key)

        return on_named

    def loss_of(self, loss_fn: Callable, has_aux: bool) -> Callable:
        """The loss that another function of the same arguments returns."""
        user = replace(self.user, loss_fn=loss_fn, has_aux=has_aux)
        return replace(self, user=user).loss()

    def loss(self) -> Callable:
        training = self.modes.of_user(for_training(self.user.loss_fn))

        def loss(flat: Mapping[str, Any], batch: Any, *key: Any) -> tuple[Any, Any]:
            result = training(*self.trees(flat), batch, *key)
            return self._weighted(
                *sorted_result(result, self.user.has_aux, self.abstract_state)
            )

        return loss

    def evaluation_loss(self) -> Callable | None:
        function = for_evaluation(self.user.loss_fn, self.user.eval_loss_fn)
        if function is None:
            return None
        evaluating = self.modes.of_user(function)

        def evaluation_loss(
            flat: Mapping[str, Any], batch: Any, *key: Any
        ) -> tuple[Any, Any]:
            result = evaluated(evaluating, (*self.trees(flat), batch), key)
            return self._weighted(result, {})

        return evaluation_loss

    def _weighted(self, loss: Any, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        return with_weight(
            loss, extra, averages_microbatches=self.averages_microbatches
        )


def _check_leaves(leaves: Mapping[str, Any], frozen: Sequence[str]) -> None:
    """Refuse parameters of which nothing can be trained, and patterns of nothing."""
    if not leaves:
        raise ValueError("The parameter pytree has no leaves; nothing can be trained.")
    for pattern in frozen:
        if not any(fnmatch(path, pattern) for path in leaves):
            raise ValueError(
                f"frozen: no parameter matches {pattern!r}. The parameters are "
                f"{', '.join(list(leaves)[:5])}, ... ({len(leaves)} in all)."
            )
    if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves.values()):
        path, leaf = next(iter(leaves.items()))
        raise ValueError(
            "No parameter is floating-point, so nothing can be trained: "
            f"{path!r} is {leaf.dtype}. Cast the parameters to float32."
        )
    _refuse_overwritten(leaves)


def _refuse_overwritten(paths: Iterable[str]) -> None:
    """Refuse leaves whose "gradient" is their new value, which an optimizer would add.

    Flax's layers in float8 keep their scales and histories there (`linen.fp8_ops`).
    """
    found = [path for path in paths if OVERWRITTEN in path.split("/")]
    if found:
        raise NotImplementedError(
            f"The parameters {listed(found)} are overwritten with their gradient, as "
            "flax.linen.fp8_ops has it, and zinf updates every parameter by the "
            "optimizer. Train without float8 layers; bf16 is a key of the config."
        )


def _leaves(source: Any, device: jax.Device) -> Iterator[tuple[str, Any]]:
    if is_function(source):
        return initialize(source, device=device)
    return leaves_of(source)


def _param_spec(
    path: str, leaf: Any, may_train: bool, mixed_dtype: str | None
) -> ParamSpec:
    if is_key(leaf):
        words = in_words(leaf)
        return ParamSpec(path, leaf, words, words, False)
    if may_train and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise NotImplementedError(
            f"The parameter {path!r} is {leaf.dtype}, and only real parameters are "
            "trained. Keep its real and imaginary parts as two arrays and combine them "
            "in the loss, or name it under `frozen`."
        )
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    master = compute = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if mixed_dtype is not None and is_float:
        compute = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(mixed_dtype))
        stored = MASTER_DTYPE if may_train else mixed_dtype
        master = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(stored))
    return ParamSpec(path, leaf, master, compute, is_float and may_train)
