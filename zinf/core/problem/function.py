"""Functions of the user that read the arrays of an engine, beside its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import jax

from zinf.core.problem.modes import TRAIN, accepts, takes_train
from zinf.core.problem.problem import Problem
from zinf.core.problem.source import Source, checked_loss, trace_function


@dataclass(frozen=True)
class Function:
    """A function over named arrays.

    Attributes:
        name: what errors call it.
        call: `(flat arrays, batch[, key]) -> outputs`, a pytree of arrays.
        key: shape and dtype of the random key; None if it takes none.
    """

    name: str
    call: Callable
    key: jax.ShapeDtypeStruct | None = None

    def trace(self, problem: Problem, batch: Any, max_bytes: int | None) -> Source:
        """The graph for one shape of microbatch; see `trace_loss`."""
        return trace_function(
            self.call,
            problem.abstract_arguments(),
            batch,
            key=self.key,
            max_remat_bytes=max_bytes or 1 << 62,
            name=self.name,
        )


def user_function(
    function: Any,
    problem: Problem,
    key: Any,
    of_params: Callable[[Callable], Callable] | None = None,
) -> Function:
    """A function of the user, `(params[, model_state], batch[, key])`, as a `Function`.

    It is called with `train=False` if it has a parameter `train`.

    Args:
        key: the random key that it is given; None for no key.
        of_params: turns a function `(module, batch[, key])` into one of parameters and
            model state. If given, `function` takes a module.

    Raises:
        ValueError: it is no function, or cannot be called with these arguments.
    """
    if key is not None and not isinstance(key, jax.Array):
        raise ValueError(
            "key must be a random key, such as jax.random.key(0); found "
            f"{type(key).__name__}."
        )
    if not callable(function):
        raise ValueError(
            "engine.apply takes a function and a batch; found "
            f"{type(function).__name__} in place of the function."
        )
    name = name_of(function)
    told = partial(function, **{TRAIN: False}) if takes_train(function) else function
    given = ["params", *(["model_state"] if problem.has_state else []), "batch"]
    if of_params is not None:
        given = ["module", "batch"]
    with_key = [*given, "key"]
    names = given if key is None else with_key
    if not accepts(told, names):
        raise ValueError(
            f"engine.apply calls {name}({', '.join(names)}), but it is "
            f"{name}{signature(function)}.{_hint(told, given, with_key, key)}"
        )
    spec = None if key is None else jax.eval_shape(lambda: key)
    called = told if of_params is None else of_params(told)
    return Function(name, problem.bound(called), spec)


def evaluation_function(problem: Problem, key: Any) -> Function:
    """The function of an evaluation: the evaluation loss, or else that of training."""
    loss = problem.evaluation_loss or problem.loss
    return Function("loss_fn", checked_loss(loss, has_aux=True), key)


def name_of(function: Any) -> str:
    """The name of a function, or the class of another callable."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", type(inner).__name__)


def _hint(function: Callable, given: list[str], with_key: list[str], key: Any) -> str:
    if key is None and accepts(function, with_key):
        return " If the last one is a random key, pass key=jax.random.key(0)."
    if key is not None and accepts(function, given):
        return " It takes no key: leave key= out."
    return ""
