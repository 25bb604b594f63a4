"""Calls of a torch module with jax arrays.

`torchax` has one environment, and a call changes the module while it lasts. Plans are
traced in several threads, so calls wait for each other (`TRACING`).
"""

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax import default_env
from torchax.interop import torch_view

from zinf.hf import gradients
from zinf.hf.derivatives import own_derivatives
from zinf.hf.weights import to_numpy

TRACING = RLock()


def outputs_of(
    module: torch.nn.Module,
    params: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array],
    options: Mapping[str, Any],
    *,
    key: jax.Array | None,
    train: bool,
    buffers: Mapping[str, np.ndarray],
    before: Callable[[], None],
) -> Any:
    """What a module returns, with torch tensors that are jax arrays.

    Args:
        params: by name; those of the module have no values.
        inputs: arrays by the names of the module's arguments.
        options: other arguments.
        key: for dropout; without it the module runs as in evaluation.
        train: whether it runs as in training.
        buffers: values in place of the module's own, by name.
        before: called in the mode in which torch tensors are jax arrays.
    """
    prng = default_env().override_property(prng=key)
    with in_torch(), prng, own_derivatives(in_torch):
        module.train(train and key is not None)
        before()
        named = module.named_buffers()
        values = {n: jnp.asarray(buffers.get(n, to_numpy(b))) for n, b in named}
        return torch.func.functional_call(
            module,
            {name: torch_view(x) for name, x in (dict(params) | values).items()},
            kwargs={n: torch_view(x) for n, x in inputs.items()} | dict(options),
            tie_weights=True,
        )


@contextmanager
def in_torch() -> Generator[None, None, None]:
    """In the `with` block, torch's functions take jax arrays, by torch's rules."""
    with TRACING, default_env(), _torch_promotion(), gradients.as_in_torch():
        yield


@contextmanager
def _torch_promotion() -> Generator[None, None, None]:
    """The promotion of ranks and dtypes that torch has, whatever jax is set to."""
    rank, dtype = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion
    with rank, dtype("standard"), warnings.catch_warnings():
        # Modules count positions and words in int64; int32 holds as many.
        text = "Explicitly requested dtype int64 .* is not available"
        warnings.filterwarnings("ignore", message=text)
        yield
