"""Trains Flax NNX modules without changes to the model.

A module is split into the variables that are trained and all others. The other
parameters are frozen. The other variables (batch statistics, counters, random keys) are
model state: the loss may change it, and each step starts from that of the step before.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import ConfigSource, make_planner, measuring
from zinf.core.engine.named import MASTER, instead_of
from zinf.core.engine.recent import SameFunction
from zinf.core.engine.runners import OtherLoss
from zinf.core.engine.tempered import tempered
from zinf.core.jaxpr import passed
from zinf.core.machine.devices import on_devices
from zinf.core.segment import (
    evaluated,
    for_evaluation,
    for_training,
    named_leaves,
)
from zinf.distributed import AbstractGroup
from zinf.inference import Decoder

logger = logging.getLogger(__name__)

Tree = dict[Any, Any]
ORDER = (
    "zinf.nnx.initialize takes (loss_fn, module, tx, config), in the order of "
    "zinf.initialize. Here the module came first, as in earlier versions."
)


@runtime_checkable
class Decodes(Protocol):
    """Methods with which a module completes prompts and scores tokens.

    With it `engine.generate` needs no decoder, and `engine.log_probabilities` works.
    `zinf.inference.Decoder` says what the methods return. `zinf.models.GPT` has them.

    Attributes:
        max_length: the most tokens of a sequence; None if there is no limit.
        like_cache: key path of the parameter whose dtype a cache has.
    """

    max_length: int | None
    like_cache: str

    def init_cache(self, starts: jax.Array, length: int, *, dtype: Any) -> Any: ...

    def decode(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]: ...

    # With a keyword argument `temperature` if `log_probabilities` is given one.
    def token_scores(self, batch: Any) -> jax.Array: ...


@runtime_checkable
class TakesBack(Decodes, Protocol):
    """Methods with which a module can also check drafts.

    `zinf.inference.Decoder` says what the methods return.
    """

    def decode_all(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]: ...

    def take_back(self, cache: Any, num_tokens: jax.Array) -> Any: ...


class ModuleEngine(Engine):
    """An engine that also returns the trained module; made by `initialize`."""

    _graphdef: Any
    _module: nnx.Module | None
    _decodes: Decodes | None
    _loss: "_Loss"

    def update_module(self) -> nnx.Module:
        """Write the trained parameters and the state into the module, and return it.

        It is the module given to `initialize`, or a new one if that was a function. The
        whole model is then in memory.
        """
        with self._turn.of("update_module"):
            found = self._read_params(), self._read_model_state()
        trees = jax.tree.map(jnp.asarray, found)
        if self._module is None:
            return nnx.merge(self._graphdef, *trees)
        nnx.update(self._module, *trees)
        return self._module

    def apply(
        self,
        function: Callable,
        batch: Any,
        *,
        key: jax.Array | None = None,
        num_microbatches: int = 1,
        kind: str = MASTER,
    ) -> Any:
        """What a function computes from the module and a batch; see `Engine.apply`.

        Args:
            function: a function `(module, batch)`, such as
                `lambda module, batch: module(batch["x"])`. It gets the module in the
                mode of `module.eval()`. Changes to the module are dropped.
        """
        with self._turn.of("apply"):
            given = function, batch, key, num_microbatches, self._of_params()
            instead = instead_of(self.planner, kind)
            return self._programs.apply(*given, instead=instead)

    def _of_params(self) -> Callable[[Callable], Callable]:
        return partial(_ModuleFunction, self._graphdef)

    def _other_loss(self, loss: Callable, has_aux: bool) -> OtherLoss:
        """A loss of the module, in the mode in which it is trained."""
        own = replace(self._loss, loss_fn=for_training(loss), has_aux=has_aux)
        return OtherLoss(SameFunction(loss), has_aux, own)

    def _token_scores(self, temperature: float) -> Callable:
        model = self._decodes
        if model is None:
            return super()._token_scores(temperature)
        return tempered(type(model).token_scores, temperature)

    def _decoder(self, given: Decoder | None) -> Decoder:
        """The given decoder, whose `apply` takes the module, or the module's own."""
        model = self._decodes
        if given is not None or model is None:
            return super()._decoder(given)
        dtype = self.planner.problem.params[model.like_cache].compute.dtype
        init = partial(model.init_cache, dtype=dtype)
        made = Decoder(type(model).decode, init, model.max_length)
        if not isinstance(model, TakesBack):
            return made
        every = type(model).decode_all
        return replace(made, apply_all=every, take_back=model.take_back)


def initialize(
    loss_fn: Callable,
    module: nnx.Module | Callable[[], nnx.Module],
    tx: optax.GradientTransformation | None,
    config: ConfigSource = None,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    eval_loss_fn: Callable | None = None,
    rng: jax.Array | None = None,
    state_rules: Mapping[str, str] | None = None,
    batch: Any = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> ModuleEngine:
    """Prepare training of a module under `loss_fn`; see `zinf.initialize`.

    If there are several microbatches, each draws its own dropout masks from the
    module's `nnx.Rngs`. The counts of the `nnx.Rngs` advance as with one microbatch.

    Args:
        loss_fn: `(module, batch) -> loss`; with `rng`, `(module, batch, key)`; with
            `has_aux`, it returns `(loss, aux)`. It may change the module's state, but
            not its parameters. If it has a parameter `train`, it is called with
            `train=True` in training and `train=False` by `evaluate`.
        module: a module, which keeps its initial values until `update_module`; or a
            function of no arguments that builds one: then it is never whole in memory.
            It is trained in the mode in which it is given. If that is the mode of
            `module.eval()`, there is a warning. `evaluate` uses the mode of
            `module.eval()`: no dropout, and running averages in batch normalisation.
        eval_loss_fn: the function that `evaluate` computes instead of `loss_fn`. It
            gets the module in the mode of `module.eval()` too; see `zinf.initialize`.
        state_rules: see `zinf.initialize`; paths are those of `engine.model_state()`.
            Counts of `nnx.Rngs` are those of the last microbatch.
        wrt: an NNX filter for the variables that are trained, such as `nnx.LoRAParam`.

    Raises:
        ValueError: as for `zinf.initialize`.
    """
    if isinstance(loss_fn, nnx.Module) or isinstance(
        module, optax.GradientTransformation
    ):
        raise ValueError(ORDER)
    config, mesh = on_devices(config, mesh)
    given = module if isinstance(module, nnx.Module) else None
    shapes = nnx.eval_shape(module) if given is None else given
    split = _split(shapes, wrt)
    params, state = split.params, split.state
    if given is None:
        params = lambda: _split(module(), wrt).params  # noqa: E731
        state = lambda: _split(module(), wrt).state  # noqa: E731
    is_reseeded = config.num_microbatches > 1 and split.has_keys
    takes_key = rng is not None
    training = for_training(loss_fn)
    loss = _Loss(split.graphdef, training, wrt, has_aux, takes_key, is_reseeded)
    evaluating = for_evaluation(loss_fn, eval_loss_fn)
    if _has_modes(split) or evaluating is not None:
        evaluating = _EvaluationLoss(split.graphdef, evaluating or loss_fn, takes_key)
    if is_reseeded and rng is None:
        rng = jax.random.key(0)
    planner = make_planner(
        loss,
        params,
        tx,
        config.model_copy(update={"frozen": (*config.frozen, *split.frozen)}),
        has_aux=has_aux,
        eval_loss_fn=evaluating,
        rng=rng,
        model_state=state,
        state_rules=split.counts_of_rngs | dict(state_rules or {}),
        mesh=mesh,
        group=group,
    )
    engine = ModuleEngine(measuring(planner), rng)
    engine._graphdef, engine._module, engine._loss = split.graphdef, given, loss
    engine._decodes = shapes if isinstance(shapes, Decodes) else None
    if batch is not None:
        engine.prepare(batch)
    return engine


@dataclass(frozen=True)
class _Split:
    """A module in parts.

    Attributes:
        params: trained and frozen parameters.
        frozen: the key paths of the frozen parameters.
        has_keys: whether the module has random keys.
        counts_of_rngs: rules of the counts of random keys, by key path of the state.
    """

    graphdef: Any
    params: Tree
    frozen: tuple[str, ...]
    state: Tree
    has_keys: bool
    counts_of_rngs: dict[str, str]


def _split(module: nnx.Module, wrt: Any) -> _Split:
    graphdef, trained, frozen, state = nnx.split(module, wrt, nnx.Param, ...)
    names = tuple(named_leaves(nnx.to_pure_dict(frozen)))
    params = nnx.to_pure_dict(nnx.merge_state(trained, frozen))
    has_keys = bool(jax.tree.leaves(nnx.state(module, nnx.RngKey)))
    counts = named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.RngCount)))
    rules = dict.fromkeys(counts, "last")
    pure = nnx.to_pure_dict(state)
    return _Split(graphdef, params, names, pure, has_keys, rules)


@dataclass(frozen=True)
class _Loss:
    """The user's loss as the pure function that `zinf.initialize` takes."""

    graphdef: Any
    loss_fn: Callable
    wrt: Any
    has_aux: bool
    takes_key: bool
    is_reseeded: bool

    def __call__(self, params: Tree, state: Tree, batch: Any, *key: jax.Array) -> Any:
        result, after = self._run(params, state, batch, *key)
        self._refuse_changes(after.params, params, state, batch, *key)
        # Variables that the loss adds, such as sown intermediates, are not model state.
        new_state = _of_structure(state, after.state)
        if not self.has_aux:
            return result, new_state
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"loss_fn must return (loss, aux); it returned {result}.")
        loss, aux = result
        return loss, (new_state, aux)

    def _run(
        self, params: Tree, state: Tree, batch: Any, *key: jax.Array
    ) -> tuple[Any, _Split]:
        """The result of the loss, and the module's parts after it."""
        module = nnx.merge(self.graphdef, params, state)
        keys = nnx.to_pure_dict(nnx.state(module, nnx.RngKey))
        if self.is_reseeded:
            # All microbatches start from the same state. Without this they would draw
            # the same dropout masks.
            salt = jax.random.bits(key[0])
            nnx.update(module, jax.tree.map(lambda k: _fold_in(k, salt), keys))
        result = self.loss_fn(module, batch, *(key if self.takes_key else ()))
        if self.is_reseeded:
            nnx.update(module, keys)
        return result, _split(module, self.wrt)

    def _refuse_changes(self, after: Tree, params: Tree, *rest: Any) -> None:
        """Raise if a parameter is another one `after` the loss of `(params, *rest)`."""
        before, new = named_leaves(params), named_leaves(after)
        if all(new.get(path) is x for path, x in before.items()):
            return

        # `nnx.remat` and `nnx.jit` return the modules that they take, with tracers of
        # another trace. In the loss's own program these are its inputs.
        def run(*arguments: Any) -> list[Any]:
            left = named_leaves(self._run(*arguments)[1].params)
            return [left.get(path, 0) for path in before]

        sources = passed(jax.make_jaxpr(run)(params, *rest))
        for number, path in enumerate(before):
            if new.get(path) is None or sources[number] != number:
                raise ValueError(
                    f"loss_fn changed the parameter {path!r}. Parameters change by the "
                    "optimizer alone; keep what the loss changes in an nnx.Variable of "
                    "another type, such as nnx.BatchStat."
                )


@dataclass(frozen=True)
class _EvaluationLoss:
    """The loss of the module in the mode of `module.eval()`. Keeps no state change."""

    graphdef: Any
    loss_fn: Callable
    takes_key: bool

    def __call__(self, params: Tree, state: Tree, batch: Any, *key: jax.Array) -> Any:
        module = nnx.merge(self.graphdef, params, state)
        module.eval()
        return evaluated(self.loss_fn, (module, batch), key if self.takes_key else ())


@dataclass(frozen=True)
class _ModuleFunction:
    """A function of the module, in the mode of `module.eval()`, on its parts."""

    graphdef: Any
    function: Callable

    def __call__(self, params: Tree, state: Tree, batch: Any, *key: jax.Array) -> Any:
        module = nnx.merge(self.graphdef, params, state)
        module.eval()
        return self.function(module, batch, *key)


def _has_modes(split: _Split) -> bool:
    """Whether `module.eval()` changes the module.

    Logs a warning if the module is already in that mode.
    """
    training, evaluating = (_module(split) for _ in range(2))
    training.train()
    evaluating.eval()
    is_changed = nnx.graphdef(evaluating) != split.graphdef
    if not is_changed and nnx.graphdef(training) != split.graphdef:
        logger.warning(
            "The module is in the mode of module.eval(), and is trained in it: without "
            "dropout, and with the running averages of batch normalisation. Call "
            "module.train() before zinf.nnx.initialize to train it as usual."
        )
    return is_changed


def _module(split: _Split) -> nnx.Module:
    return nnx.merge(split.graphdef, split.params, split.state)


def _fold_in(keys: jax.Array, salt: jax.Array) -> jax.Array:
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), salt)
    return folded.reshape(keys.shape)


def _of_structure(wanted: Mapping, found: Mapping) -> Tree:
    return {
        k: _of_structure(v, found[k]) if isinstance(v, Mapping) else found[k]
        for k, v in wanted.items()
    }
