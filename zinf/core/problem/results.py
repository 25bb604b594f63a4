"""What the user's loss returns: the loss, auxiliary values and model state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr.keys import to_words
from zinf.core.problem.source import (
    NUMBERS,
    WrongResult,
    described,
    named_leaves,
)


def sorted_result(
    result: Any, has_aux: bool, abstract_state: Any
) -> tuple[Any, Mapping[str, Any]]:
    """`(loss, {"aux", "model_state"})` from what the user's function returns."""
    has_state = abstract_state is not None
    wanted = "(loss, new_model_state)" if has_state else "(loss, aux)"
    if has_aux and has_state:
        wanted = "(loss, (new_model_state, aux))"
    if not (has_aux or has_state):
        if isinstance(result, tuple):
            raise WrongResult(
                f"loss_fn returned a tuple of {len(result)}; it must return the loss "
                "alone. If it returns (loss, aux), pass has_aux=True."
            )
        return result, {}
    if not isinstance(result, tuple) or len(result) != 2:
        raise WrongResult(
            f"loss_fn must return {wanted}; it returned {described(result)}."
        )
    loss, extra = result
    state, aux = None, None
    if has_aux and has_state:
        if not isinstance(extra, tuple) or len(extra) != 2:
            raise WrongResult(
                f"loss_fn must return {wanted}; it returned {described(result)}."
            )
        state, aux = extra
    elif has_state:
        state = extra
    else:
        aux = extra
    if has_state:
        _check_state(state, abstract_state, wanted)
    return loss, {"aux": _unwrapped(aux), "model_state": _unwrapped(state)}


def _check_state(state: Any, wanted: Any, returned: str) -> None:
    if jax.tree.structure(state) != jax.tree.structure(wanted):
        raise WrongResult(
            f"loss_fn must return {returned} with the structure of model_state, "
            f"{jax.tree.structure(wanted)}; it returned {jax.tree.structure(state)}."
        )
    new = named_leaves(state)
    for path, old in named_leaves(wanted).items():
        found = jnp.shape(new[path]), jnp.result_type(new[path])
        if found != (old.shape, old.dtype):
            raise WrongResult(
                f"loss_fn returned the model state {path!r} as {found[1]}"
                f"{list(found[0])}, but it is {old.dtype}{list(old.shape)}. Shapes and "
                "dtypes must stay what they are; cast it in loss_fn."
            )


def _unwrapped(tree: Any) -> Any:
    for path, leaf in named_leaves(tree).items():
        if not isinstance(leaf, NUMBERS):
            raise WrongResult(
                f"loss_fn returned {path!r} as {described(leaf)}, beside the loss; "
                "what it returns there are arrays of numbers. Leave it out."
            )
    return jax.tree.map(lambda x: to_words(jnp.asarray(x)), tree)
