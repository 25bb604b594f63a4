"""Adapters of any loss, without naming a leaf: those of weights merged by hand."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.programs import PROGRAMS
from tests.equivalence.test_programs import BATCH_OF
from tests.equivalence.training import streamed_config
from tests.unit.adapt.small import merged_by_hand
from zinf.program import ArrayId, Role
from zinf.segment import named_leaves

# The order of float32 sums, as in test_programs. Programs that cast to bfloat16 round
# the two products, and the merged weight, to 2^-9 some eight times.
TOLERANCE, BFLOAT16 = 1e-5, 2**-4
# No weight of theirs is multiplied by an activation.
WITHOUT = {
    "weights_normalised_before_use",
    "a_loss_that_is_a_parameter",
    "a_loss_without_a_gradient",
    # Its rows are stacked anew before the loop over experts, where all-linear does not
    # look for weights.
    "experts_fetched_in_pieces",
}
ADAPTED = [p for p in PROGRAMS if p.name not in WITHOUT]
KEY = jax.random.key(11, impl="unsafe_rbg")
# So small that no program diverges: the first trace is the gradient at any rate.
TX = optax.sgd(1e-3, momentum=0.9)
PLACES = (("none", "none"), ("cpu", "cpu"), ("nvme", "nvme"))


def loss_by_hand(program, adapted, params, adapters):
    """The mean loss of step 0 over its microbatches, with merged weights."""
    merged = merged_by_hand(adapted, params, adapters)
    count = program.config.get("gradient_accumulation_steps", 1)
    step, losses = jax.random.fold_in(KEY, 0), []
    for m in range(count):
        rows = BATCH_OF(program, m, count)
        key = step if count == 1 else jax.random.fold_in(step, m)
        result = program.loss(merged, rows, *([key] if program.uses_key else []))
        losses.append(result[0] if program.has_aux else result)
    return sum(losses) / count


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize("program", ADAPTED, ids=lambda p: p.name)
def test_adapters_train_as_merged_by_hand_on_every_tier(program):
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
                gradients = {
                    p: np.array(engine.residents.read(ArrayId(Role.STATE, p, slot=0)))
                    for p in paths
                }
            losses[-1] += [engine.step(program.batch)["loss"] for _ in range(2)]
            engine.close()
    assert losses[0] == losses[1] == losses[2]
    assert {*gradients} == {
        f"adapter/{path}" for path in named_leaves(params["adapter"])
    }
    base = jax.tree.map(jnp.asarray, params["base"])
    by_hand = jax.value_and_grad(
        lambda adapters: loss_by_hand(program, adapted, base, adapters)
    )
    loss, wanted = by_hand(jax.tree.map(jnp.asarray, params["adapter"]))
    tolerance = BFLOAT16 if "cast" in program.name else TOLERANCE
    np.testing.assert_allclose(losses[0][0], loss, rtol=tolerance)
    for path, grad in named_leaves(wanted).items():
        atol = tolerance * np.max(np.abs(grad), initial=0)
        found = gradients[f"adapter/{path}"]
        np.testing.assert_allclose(found, grad, rtol=0, atol=atol, err_msg=path)
