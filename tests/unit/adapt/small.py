"""Small losses, and adapters merged by hand."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.adapt import Adapted
from zinf.core.segment import named_leaves

DIM, ROWS = 8, 4


def normal(seed: int, *shape: int) -> jax.Array:
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal(shape, np.float32) * shape[0] ** -0.5)


BATCH = {"x": normal(0, ROWS, DIM), "y": normal(1, ROWS, DIM)}


def two_layers() -> dict[str, Any]:
    return {
        "first": {"kernel": normal(2, DIM, 6), "bias": jnp.ones((1, 6))},
        "second": {"kernel": normal(3, 6, DIM)},
    }


def two_layers_loss(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    return jnp.mean(jnp.square(x @ params["second"]["kernel"] - batch["y"]))


def changes(adapted: Adapted, adapters: Mapping[str, Any]) -> dict[str, jax.Array]:
    """scale * lora_A lora_B of each weight, in its shape, by one einsum each."""
    found = {}
    for path, target in adapted.targets.items():
        how, letters = target.contraction, "abcdefgh"
        lead, inputs, outputs = (
            "".join(letters[i] for i in dims)
            for dims in (target.lead, how.inputs, how.outputs)
        )
        whole = "".join(sorted(lead + inputs + outputs))
        formula = f"{lead}{inputs}z,{lead}z{outputs}->{whole}"
        a, b = adapters[path]["lora_A"], adapters[path]["lora_B"]
        change = target.scale * jnp.einsum(formula, a, b)
        found[path] = change.reshape(target.shape)
    return found


def merged_by_hand(adapted: Adapted, params: Any, adapters: Mapping[str, Any]) -> Any:
    """The parameters with every adapter added to its weight."""
    added = changes(adapted, adapters)
    leaves = {p: x + added.get(p, 0) for p, x in named_leaves(params).items()}
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
