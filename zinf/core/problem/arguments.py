"""Checks the arguments of `zinf.initialize` before anything is traced or made.

A mistake that is found here is reported in one sentence, from a frame just below the
caller's. Found later, during a trace, it would be an error from inside jax or optax.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.problem.modes import for_training

RAW_KEY_SHAPES = ((2,), (4,))


def check_arguments(
    loss_fn: Any, params: Any, tx: Any, *, has_state: bool, rng: Any
) -> None:
    """Raise if an argument is of a wrong kind.

    Args:
        has_state: whether `model_state` was given.

    Raises:
        ValueError: the message says what was found and what to give instead.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn must be a function; found {_kind(loss_fn)}. The order is "
            "zinf.initialize(loss_fn, params, tx, config)."
        )
    _check_init(params)
    _check_tx(tx)
    if rng is not None:
        _check_key(rng)
    # zinf itself passes `train=` to a loss that takes it, so it is not missing.
    _check_signature(
        for_training(loss_fn), has_state=has_state, has_key=rng is not None
    )


def _check_init(params: Any) -> None:
    if inspect.isfunction(params) and not _takes(params, ()):
        raise ValueError(
            f"params is the function {_named(params)}, and zinf calls it without "
            "arguments. Give the parameters, or a function of none: "
            "lambda: init(key)."
        )
    # flax.nnx is slow to import. A caller who has a module has imported it already.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module):
        _, _, rest = nnx.split(params, nnx.Param, ...)
        if jax.tree.leaves(rest):
            name = type(params).__name__
            raise ValueError(
                f"params is the NNX module {name}, which has state beside its "
                "parameters (random keys, statistics). It would stand still here: "
                "dropout would draw one mask again and again. Give the module to "
                "zinf.nnx.initialize(loss_fn, module, tx, config), which carries it on."
            )


def _check_tx(tx: Any) -> None:
    parts = (getattr(tx, name, None) for name in ("init", "update"))
    if all(map(callable, parts)) and not isinstance(tx, type):
        return
    hint = "Give one, such as optax.adamw(3e-4)."
    if callable(tx):
        hint = (
            "Call what makes one: optax.adamw(3e-4), not optax.adamw. A schedule goes "
            "into it: optax.adamw(schedule)."
        )
    kind = optax.GradientTransformation.__name__
    raise ValueError(f"tx must be an optax.{kind}; found {_kind(tx)}. {hint}")


def _check_key(rng: Any) -> None:
    if isinstance(rng, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        is_typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if is_typed and rng.shape == ():
            return
        if rng.dtype == jnp.uint32 and rng.shape in RAW_KEY_SHAPES:
            return
    raise ValueError(
        f"rng must be one random key, such as jax.random.key(0); found {_kind(rng)}."
    )


def _check_signature(loss_fn: Callable, *, has_state: bool, has_key: bool) -> None:
    given = ["params", *(["model_state"] if has_state else []), "batch"]
    with_key = [*given, "key"]
    called = with_key if has_key else given
    if _takes(loss_fn, called):
        return
    call, name = f"loss_fn({', '.join(called)})", _named(loss_fn)
    if has_key and _takes(loss_fn, given):
        raise ValueError(
            f"rng= was given, so zinf calls {call}, but {name} takes no key. Add a "
            "parameter for the key, or leave rng= out."
        )
    hint = ""
    if not has_key and _takes(loss_fn, with_key):
        hint = " If the last one is a random key, pass rng=jax.random.key(0)."
        if not has_state:
            hint += " If it is model state, pass model_state=."
    raise ValueError(f"zinf calls {call}, but loss_fn is {name}.{hint}")


def _takes(function: Callable, arguments: Any) -> bool:
    """Whether a function can be called with as many positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _named(function: Callable) -> str:
    """Name and signature of a function, such as "loss(params, batch)"."""
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__name__", type(inner).__name__)
    return f"{name}{inspect.signature(function)}"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    if isinstance(value, jax.Array):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"
