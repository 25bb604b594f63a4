"""The streamed and the fused step compute what plain JAX and optax compute."""

import numpy as np
import pytest

from tests.equivalence.models import EQUINOX, MODELS, PYTREE
from tests.equivalence.training import BOTH, ON_DEVICE, train, train_in_jax
from tests.marks import slow_except
from zinf.segment import named_leaves

# Float32 sums of some thousand terms in another order differ by about 1e-6 of the
# largest: 1e-5 leaves room for a network's depth and for twenty steps. No model has a
# parameter whose gradient is zero but for rounding, such as the bias of attention keys.
TOLERANCE = 1e-5
STREAMED, FUSED = WAYS = (ON_DEVICE, None)
# One by one for the model that compiles fastest, together for the others.
CASES = [(PYTREE, "accumulation"), (PYTREE, "clipping")]
CASES += [(m, v) for m in MODELS for v in ("plain", BOTH)]
# One model in no setting and in both, both ways; the others once.
FAST = [(PYTREE, v, way) for v in ("plain", BOTH) for way in WAYS]
FAST += [(model, BOTH, STREAMED) for model in MODELS[1:]]


def name_of(value):
    if value in WAYS:
        return "streamed" if value == STREAMED else "fused"
    return value if isinstance(value, str) else value.name


def assert_same_leaves(found, wanted):
    """Each leaf to within 1e-5 of its largest entry."""
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        largest = np.max(np.abs(leaf))
        assert largest > 0, path
        np.testing.assert_allclose(
            found[path], leaf, rtol=0, atol=TOLERANCE * largest, err_msg=path
        )


@pytest.mark.sampled(2, slow=4)
@pytest.mark.parametrize(
    ("model", "variant", "placement"),
    slow_except(FAST, [(*case, way) for case in CASES for way in WAYS]),
    ids=name_of,
)
def test_gradients_and_losses_are_those_of_plain_jax(model, variant, placement):
    found = train(model, variant, placement, "sgd")
    wanted = train_in_jax(model, variant, "sgd")
    assert_same_leaves(found.gradients, wanted.gradients)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(found.grad_norms, wanted.grad_norms, rtol=TOLERANCE)
    assert_same_leaves(*map(named_leaves, (found.params, wanted.params)))


ADAM = [(PYTREE, "adam"), (EQUINOX, "adam")]
WHOLE_LEAF = [(PYTREE, name) for name in ("lamb", "adafactor", "muon")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "optimizer", "placement"),
    slow_except(
        [
            (PYTREE, "adam", FUSED),
            (PYTREE, "adam", STREAMED),
            (PYTREE, "muon", STREAMED),
        ],
        [(*case, way) for case in ADAM + WHOLE_LEAF for way in WAYS],
    ),
    ids=name_of,
)
def test_losses_are_those_of_optax(model, optimizer, placement):
    found = train(model, "plain", placement, optimizer)
    wanted = train_in_jax(model, "plain", optimizer)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=TOLERANCE)
