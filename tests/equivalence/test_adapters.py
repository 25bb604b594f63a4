"""Adapters of any loss, without naming a leaf: those of weights merged by hand."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.programs import PROGRAMS
from tests.equivalence.test_programs import KEY, read_trace
from tests.equivalence.training import ON_DEVICE, ON_HOST, ON_NVME, streamed_config
from tests.unit.adapt.small import merged_by_hand
from zinf.core.segment import named_leaves

# The order of float32 sums, as in test_programs. Programs that cast to bfloat16 round
# the two products, and the merged weight, to 2^-9 some eight times.
TOLERANCE, BFLOAT16 = 1e-5, 2**-4
# One of each way to reach a weight: keys and microbatches, a table, casts, rows of
# stacks, remat, a recurrent loop, convolutions, experts, a module.
FAST = "dropout_with_microbatches"
NAMES = [
    FAST,
    "tied_embeddings",
    "stacked_parameters_cast_at_the_top",
    "stacks_of_stacks_numbers_and_integers",
    "checkpointed_pairs_larger_than_a_segment",
    "recurrent_layers",
    "an_nnx_module_with_scanned_layers",
    "a_conv_net_without_repetition",
    "experts_of_every_layer",
]
# So small that no program diverges: the first trace is the gradient at any rate.
TX = optax.sgd(1e-3, momentum=0.9)
PLACES = (ON_DEVICE, ON_HOST, ON_NVME)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in NAMES],
)
def test_adapters_train_as_merged_by_hand_on_every_tier(name):
    (program,) = (p for p in PROGRAMS if p.name == name)
    key = KEY if program.uses_key else None
    # A random lora_B: with zeros the gradient of lora_A would be zero. Scale one: with
    # four, as by default, networks this narrow amplify so much that two orders of the
    # same float32 sums, both in plain jax, differed by 1.3e-5.
    adapted = zinf.adapt.lora(
        program.loss,
        program.init,
        batch=program.batch,
        rng=key,
        r=2,
        lora_alpha=2,
        init_lora_weights=False,
    )
    losses, gradients = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for place in PLACES:
            own = {k: v for k, v in program.config.items() if k != "frozen"}
            config = {**streamed_config(place, folder), "persistence_threshold": 0}
            engine = zinf.initialize(
                adapted.loss_fn,
                adapted.params,
                TX,
                adapted.config({**config, **own}),
                has_aux=program.has_aux,
                rng=key,
            )
            params = engine.params()
            losses.append([engine.step(program.batch)["loss"]])
            if not gradients:
                paths = [leaf.path for leaf in engine.planner.separated.leaves]
                gradients = {path: read_trace(engine, path) for path in paths}
            losses[-1] += [engine.step(program.batch)["loss"] for _ in range(2)]
            engine.close()
    assert losses[0] == losses[1] == losses[2]
    assert {*gradients} == {
        f"adapter/{path}" for path in named_leaves(params["adapter"])
    }
    base = jax.tree.map(jnp.asarray, params["base"])

    def loss_by_hand(adapters):
        return program.mean_loss(merged_by_hand(adapted, base, adapters), KEY, 0)

    by_hand = jax.value_and_grad(loss_by_hand)
    loss, wanted = by_hand(jax.tree.map(jnp.asarray, params["adapter"]))
    tolerance = BFLOAT16 if "cast" in program.name else TOLERANCE
    np.testing.assert_allclose(losses[0][0], loss, rtol=tolerance)
    for path, grad in named_leaves(wanted).items():
        atol = tolerance * np.max(np.abs(grad), initial=0)
        found = gradients[f"adapter/{path}"]
        np.testing.assert_allclose(found, grad, rtol=0, atol=atol, err_msg=path)
