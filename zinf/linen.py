"""Trains from a Flax Linen `TrainState`, and returns one.

`state.tx` trains `state.params`. The fields that a subclass of TrainState adds (batch
statistics, a random key) are model state. The loss takes and returns it as a dict by
field name, just as `apply(..., mutable=[...])` takes and returns collections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh

from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import ConfigSource, make_planner, measuring
from zinf.core.jaxpr.keys import from_words, to_words
from zinf.core.program import ArrayId
from zinf.core.segment import for_evaluation, for_training, named_leaves
from zinf.distributed import AbstractGroup, Digests

OWN_FIELDS = frozenset(field.name for field in fields(TrainState))
ORDER = (
    "zinf.linen.initialize takes (loss_fn, state, config), in the order of "
    "zinf.initialize. Here the state came first, as in earlier versions."
)


class TrainStateEngine(Engine):
    """An engine that also returns a `TrainState`; made by `initialize`."""

    _template: TrainState
    _given_optimizer: Any = None  # the given one, until it is placed

    def train_state(self) -> TrainState:
        """The state after the steps taken. The whole state is then in memory.

        Its optimizer state has the structure of `tx.init(params)`. Entries of frozen
        parameters have the values that `tx.init` gives them.
        """
        with self._turn.of("train_state"):
            params = jax.tree.map(jnp.asarray, self._read_params())
            added = jax.tree.map(jnp.asarray, self._read_model_state() or {})
            optimizer = self._given_optimizer
            if optimizer is None:
                optimizer = self._optimizer_state(params)
        return self._template.replace(
            step=self.num_steps, params=params, opt_state=optimizer, **added
        )

    def initialize_state(self) -> None:
        super().initialize_state()
        if self._given_optimizer is not None:
            given, self._given_optimizer = named_leaves(self._given_optimizer), None
            digests = Digests(self.planner.group)
            for name, array in self._optimizer_arrays().items():
                content = np.asarray(to_words(given[name]))
                digests.add(name, content)
                self._runners.residents.write(array, content)
            digests.agree()

    def _optimizer_state(self, params: Any) -> Any:
        tx = self._template.tx
        abstract = jax.eval_shape(tx.init, params)
        shared = self._all_scalars()["shared"]
        found = {s["name"]: np.asarray(s["value"], s["dtype"]) for s in shared}
        if self.is_placed:
            arrays, residents = self._optimizer_arrays(), self._current_residents()
            found |= {name: residents.read(array) for name, array in arrays.items()}
        specs = named_leaves(abstract)

        @jax.jit
        def initial(params: Any) -> dict[str, Any]:
            state = named_leaves(tx.init(params))
            return {n: x for n, x in state.items() if n not in found}

        first = initial(params)
        leaves = [
            first[n] if n in first else jnp.asarray(from_words(found[n], s))
            for n, s in specs.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def _optimizer_arrays(self) -> dict[str, ArrayId]:
        """The arrays of the optimizer state by their key path in optax's tree."""
        return {
            state.optax_path: state.array(leaf.path)
            for leaf in self.planner.separated.leaves
            for state in leaf.states
        }


def initialize(
    loss_fn: Callable,
    state: TrainState | Callable[[], TrainState],
    config: ConfigSource = None,
    *,
    has_aux: bool = False,
    eval_loss_fn: Callable | None = None,
    rng: jax.Array | None = None,
    state_rules: Mapping[str, str] | None = None,
    batch: Any = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> TrainStateEngine:
    """Prepare training of a `TrainState` under `loss_fn`; see `zinf.initialize`.

    Args:
        loss_fn: `(params, batch[, key]) -> loss`, or `(loss, aux)` with `has_aux`. If
            the class of `state` adds fields to TrainState, such as `batch_stats`, it is
            `(params, model_state, batch[, key])` and returns `(loss, new_model_state)`,
            or `(loss, (new_model_state, aux))`. `model_state` is a dict of those
            fields; fields that `new_model_state` leaves out do not change. If it has a
            parameter `train`, it is called with `train=True` in training and
            `train=False` by `evaluate`.
        state: the state where training starts, with its step and optimizer state; or a
            function of no arguments that creates one: then it is never whole in memory.
        eval_loss_fn: the function that `evaluate` computes instead of `loss_fn`, such
            as `apply` without dropout and with running averages; see `zinf.initialize`.
        state_rules: see `zinf.initialize`; paths begin with the name of the field.

    Raises:
        ValueError: as for `zinf.initialize`.
    """
    if isinstance(loss_fn, TrainState) or _takes_arguments(state):
        raise ValueError(ORDER)
    given = state if isinstance(state, TrainState) else None

    def create() -> TrainState:
        return state if isinstance(state, TrainState) else state()

    def model_state() -> dict[str, Any]:
        created = create()
        return {name: getattr(created, name) for name in names}

    template = jax.eval_shape(create)
    names = _added_fields(template)
    evaluating = for_evaluation(loss_fn, eval_loss_fn)
    planner = make_planner(
        _Loss(for_training(loss_fn), has_aux) if names else loss_fn,
        given.params if given is not None else lambda: create().params,
        template.tx,
        config,
        has_aux=has_aux,
        eval_loss_fn=evaluating,
        rng=rng,
        model_state=model_state if names else None,
        state_rules=state_rules,
        mesh=mesh,
        group=group,
    )
    engine = TrainStateEngine(measuring(planner), rng)
    engine._template = template
    if given is not None:
        engine._given_optimizer = given.opt_state
        engine.set_scalars(_scalars_of(given, engine))
    if batch is not None:
        engine.prepare(batch)
    return engine


def _takes_arguments(state: Any) -> bool:
    """Whether `state` is a function that cannot be called without arguments."""
    if isinstance(state, TrainState):
        return False
    try:
        signature(state).bind()
    except TypeError:
        return True
    return False


@dataclass(frozen=True)
class _Loss:
    """A loss that may return only a part of the model state."""

    loss_fn: Callable
    has_aux: bool

    def __call__(self, params: Any, state: Mapping[str, Any], *rest: Any) -> Any:
        result = self.loss_fn(params, dict(state), *rest)
        match result:
            case (loss, (Mapping() as new, aux)) if self.has_aux:
                return loss, ({**state, **new}, aux)
            case (loss, Mapping() as new) if not self.has_aux:
                return loss, {**state, **new}
        return result  # the caller refuses it and says what is expected


def _added_fields(template: TrainState) -> list[str]:
    """The array fields that the class of `template` adds to TrainState."""
    return [
        field.name
        for field in fields(template)
        if field.name not in OWN_FIELDS and field.metadata.get("pytree_node", True)
    ]


def _scalars_of(state: TrainState, engine: Engine) -> dict[str, Any]:
    """The scalars of an engine that continues from `state`."""
    given = named_leaves(state.opt_state)
    scalars = engine.scalars()
    shared = [
        {**s, "value": np.asarray(to_words(given[s["name"]])).tolist()}
        for s in scalars["shared"]
    ]
    return {**scalars, "num_steps": int(state.step), "shared": shared}
