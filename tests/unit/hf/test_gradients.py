"""Operations that have no gradient in torch, or one of their own, have it in jax."""

from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import jax
import jax.numpy as jnp
import optax
import torch
from torchax import default_env
from torchax.interop import jax_view, torch_view

from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import STREAMED, save, tokens
from zinf import hf
from zinf.hf import gradients
from zinf.hf.derivatives import own_derivatives


def in_no_grad(x, then):
    with torch.no_grad():
        return then(x)


class Bounded(torch.autograd.Function):
    """A square root whose derivative, infinite at 0, is at most 10."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / torch.sqrt(torch.clip(4 * x, min=1e-2))


class Estimated(torch.autograd.Function):
    """Another gradient than its derivative; one argument has none, one is no array."""

    @staticmethod
    def forward(ctx, x, places, power, y):
        ctx.power = power
        ctx.save_for_backward(x, places)
        return x[places] ** power, y

    @staticmethod
    def backward(ctx, gradient, _):
        x, places = ctx.saved_tensors
        return torch.zeros_like(x) + ctx.power * gradient[places], None, None, None


class Parted(torch.autograd.Function):
    """In the newer form, with what is saved apart."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, gradient):
        x, output = ctx.saved_tensors
        return gradient * x * output


def estimated(x):
    places = torch.argsort(x).to(torch.int32)
    first, second = Estimated.apply(x, places, 3, x * x)
    return first + second


# Each as a function of four numbers.
CASES = {
    "method": lambda x: x.detach() * x,
    "function": lambda x: torch.detach(x) * x,
    "of a slice": lambda x: x[:2].detach() * x[2:],
    "of a view": lambda x: x.view(2, 2).detach() * x.view(2, 2),
    "no_grad": lambda x: in_no_grad(x, torch.exp) * x,
    "several results": lambda x: in_no_grad(x * x, lambda y: y.chunk(2))[0] * x[2:],
    "in place": lambda x: in_no_grad(x, lambda y: (y * y).add_(1).view(4)) * x,
    "a bounded derivative": lambda x: in_no_grad(x, torch.exp) + Bounded.apply(x * 0),
    "an estimated derivative": estimated,
    "a derivative in two parts": lambda x: Parted.apply(x),
    "enabled again": lambda x: in_no_grad(x, torch.enable_grad()(torch.exp)) * x,
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_torch(name):
    """The caller's `no_grad`, which is about torch's own arrays, changes nothing."""
    function, values = CASES[name], np.float32([0.5, -1, 2, 1.5])
    given = torch.tensor(values, requires_grad=True)
    function(given).sum().backward()
    gradients.register()

    @contextmanager
    def in_torch():
        with default_env(), gradients.as_in_torch():
            yield

    def summed(x):
        with in_torch(), own_derivatives(in_torch):
            return jnp.sum(jax_view(function(torch_view(x))))

    with torch.no_grad():
        found = jax.grad(summed)(jnp.asarray(values))
    # One exponential in float32.
    np.testing.assert_allclose(found, given.grad, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["fused", "streamed"])
def test_a_parameter_that_torch_freezes_is_not_trained(execution, tmp_path):
    """Not even by weight decay, which needs no gradient."""
    frozen = "model.decoder.embed_positions.weight"
    before = save(config_of("marian"), tmp_path).state_dict()
    model, batch = hf.load(tmp_path), {"input_ids": tokens()[:, :8]}
    assert model.untrained == (frozen,)
    config = STREAMED | {"execution": execution}
    tx = optax.adamw(0.1, weight_decay=0.1)
    with hf.initialize(model, tx, config, batch=batch) as engine:
        engine.step(batch)
        after = engine.params()
    # Biases of 0 that the decoder does not use stay 0, so not all others change.
    weights = {n for n, x in before.items() if n in after and x.any()}
    changed = {n for n in weights if not np.array_equal(after[n], before[n])}
    assert changed == weights - {frozen}
