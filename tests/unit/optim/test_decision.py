from functools import partial
from math import inf, nan, sqrt

import pytest

from zinf.optim.clipping import TORCH_EPSILON, Clipping
from zinf.optim.decision import Decision, decide

plain = partial(decide, clipping=Clipping(), loss_scale=1.0, skips_overflow=False)
fp16 = partial(decide, clipping=Clipping(), loss_scale=8.0, skips_overflow=True)


def test_the_loss_is_the_mean_of_the_microbatches():
    assert plain([1.0, 2.0, 6.0], [0.0]).loss == 3.0


def test_the_norm_is_that_of_the_whole_gradient_unscaled():
    assert plain([0.0], [9.0, 16.0]).grad_norm == 5.0
    assert fp16([0.0], [9.0, 16.0]).grad_norm == 5.0 / 8


def test_without_clipping_gradients_are_only_unscaled():
    assert plain([0.0], [9.0]).factor == 1.0
    assert fp16([0.0], [9.0]).factor == 1 / 8


def test_a_norm_above_the_limit_is_clipped_to_it():
    found = plain([0.0], [9.0, 16.0], clipping=Clipping(2.0))
    assert found.factor == 2.0 / (5.0 + TORCH_EPSILON)
    assert found.grad_norm == 5.0
    scaled = fp16([0.0], [9.0, 16.0], clipping=Clipping(0.5))
    assert scaled.factor == 0.5 / (5 / 8 + TORCH_EPSILON) / 8


def test_a_norm_below_the_limit_is_not():
    assert plain([0.0], [1.0], clipping=Clipping(2.0)).factor == 1.0


def test_optax_divides_by_the_norm_alone_after_the_clipping_of_the_config():
    after = Clipping(optax_bounds=(2.0, 1.0))
    assert plain([0.0], [9.0, 16.0], clipping=after).factor == 1.0 / 5.0
    both = plain([0.0], [9.0, 16.0], clipping=Clipping(2.0, (1.0,)))
    assert both.factor == pytest.approx(1.0 / 5.0, rel=1e-15)
    below = plain([0.0], [9.0, 16.0], clipping=Clipping(2.0, (4.0,)))
    assert below.factor == 2.0 / (5.0 + TORCH_EPSILON)


def test_without_norms_only_the_loss_is_looked_at():
    assert fp16([3.0], None) == Decision(3.0, None, 1 / 8, False)


def test_the_sum_of_squares_is_in_double_precision():
    # In float32, 2**24 + 1 is 2**24.
    assert plain([0.0], [2.0**24, 1.0]).grad_norm == sqrt(2**24 + 1)


@pytest.mark.parametrize("loss", [inf, -inf, nan])
def test_a_loss_that_is_not_finite_is_refused_with_a_list_of_the_microbatches(loss):
    for norms in (None, [1.0]):
        found = plain([1.0, loss], norms)
        assert found.skips
        assert f"by microbatch: 1.0, {loss}" in found.refusal


@pytest.mark.parametrize("square", [inf, nan])
def test_a_gradient_that_is_not_finite_is_refused(square):
    found = plain([1.0], [1.0, square])
    assert found.skips
    assert "gradient norm" in found.refusal


@pytest.mark.parametrize(
    ("losses", "squares"), [([1.0], [inf]), ([1.0], [nan]), ([inf], [1.0])]
)
def test_with_a_loss_scale_it_skips_the_step(losses, squares):
    found = fp16(losses, squares)
    assert found.skips
    assert found.factor == 0.0
