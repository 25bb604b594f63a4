"""The losses of training and evaluation, from the user's functions."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

TRAIN = "train"


def for_training(loss_fn: Callable) -> Callable:
    """`loss_fn`, called with `train=True` if it takes `train`."""
    return partial(loss_fn, train=True) if takes_train(loss_fn) else loss_fn


def for_evaluation(loss_fn: Callable, eval_loss_fn: Callable | None) -> Callable | None:
    """The evaluation loss; None if it is the training loss.

    Args:
        eval_loss_fn: takes the arguments of `loss_fn`, with or without the random key,
            and returns the loss, alone or first in a tuple.
    """
    if eval_loss_fn is None:
        return partial(loss_fn, train=False) if takes_train(loss_fn) else None
    if takes_train(eval_loss_fn):
        eval_loss_fn = partial(eval_loss_fn, train=False)
    return eval_loss_fn


def takes_train(function: Callable) -> bool:
    """Whether a loss has a parameter `train`, to set in training and evaluation.

    If the user has set it already, by `functools.partial`, it counts as absent.
    """
    if isinstance(function, partial) and TRAIN in function.keywords:
        return False
    parameter = _parameters(function).get(TRAIN)
    return parameter is not None and parameter.kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def evaluated(function: Callable, arguments: tuple[Any, ...], key: tuple) -> Any:
    """The loss that an evaluation function returns, without auxiliary values.

    The function gets the key if it takes one.
    """
    given = (*arguments, *key) if accepts(function, (*arguments, *key)) else arguments
    result = function(*given)
    return result[0] if isinstance(result, tuple) and result else result


def accepts(function: Callable, arguments: Sequence[Any]) -> bool:
    """Whether a function can be called with as many positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
