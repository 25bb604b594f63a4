"""Operations that have no gradient in torch have none in jax."""

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


def in_no_grad(x, then):
    with torch.no_grad():
        return then(x)


class Doubled(torch.autograd.Function):
    """Torch runs its forward pass without gradients, and it has one."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


# Each as a function of four numbers.
CASES = {
    "method": lambda x: x.detach() * x,
    "function": lambda x: torch.detach(x) * x,
    "of a slice": lambda x: x[:2].detach() * x[2:],
    "of a view": lambda x: x.view(2, 2).detach() * x.view(2, 2),
    "no_grad": lambda x: in_no_grad(x, torch.exp) * x,
    "several results": lambda x: in_no_grad(x * x, lambda y: y.chunk(2))[0] * x[2:],
    "in place": lambda x: in_no_grad(x, lambda y: (y * y).add_(1).view(4)) * x,
    "a function of its own": lambda x: in_no_grad(x, torch.exp) + Doubled.apply(x),
    "enabled again": lambda x: in_no_grad(x, torch.enable_grad()(torch.exp)) * x,
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_stops_where_torch_stops_it(name):
    """The caller's `no_grad`, which is about torch's own arrays, changes nothing."""
    function, values = CASES[name], np.float32([0.5, -1, 2, 1.5])
    given = torch.tensor(values, requires_grad=True)
    function(given).sum().backward()
    gradients.register()

    def summed(x):
        with default_env(), gradients.as_in_torch():
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
