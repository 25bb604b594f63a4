"""Tiny random models of each architecture: logits, gradients and training in torch."""

import numpy as np
import optax
import pytest

from tests.marks import drawn
from tests.unit.hf.architectures import OWN_ATTENTION, TABLE, config_of
from tests.unit.hf.models import make, off, on_tier, params_of, tokens

import jax  # isort: skip
import torch  # isort: skip

from zinf import hf  # isort: skip
from zinf_kernels.attention import choosing  # isort: skip

pytestmark = pytest.mark.slow
# Both sides compute in float32. The largest entry of the logits is 1 here, and two
# layers round it a few times.
LOGITS = 2e-6
# A gradient is a sum over layers and tokens of products that were rounded before. Each
# leaf is compared with its own largest entry, or with a thousandth of that of all
# leaves: some gradients are 0 up to rounding, as those of the biases of keys.
GRADIENTS = 1e-5
# Numbers near 4, as losses are here, are 2e-7 of them apart in float32.
LOSSES = 1e-6
# Windows, soft caps and a tied head; rotary pairs of neighbours; a state space;
# experts, of which each has biases; cycles without a gradient, and a frozen parameter.
FIXED = {
    "gemma2": "nvme",
    "gptj": "host",
    "mamba2": "host",
    "gpt_oss": "nvme",
    "hrm_text": "nvme",
}
OTHERS = [name for name in TABLE if name not in FIXED]
RATE = 0.1


def torch_results(model, ids):
    """Logits, gradients of the mean loss of the next token, and losses of SGD.

    Parameters that torch does not train have no gradient here.
    """
    steps = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    ids = torch.tensor(ids).long()
    losses, first = [], None
    for _ in range(3):
        steps.zero_grad()
        logits = model(ids, use_cache=False).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        loss = torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))
        loss.backward()
        if first is None:
            gradients = {
                name: np.zeros(p.shape, np.float32)
                if p.grad is None
                else p.grad.numpy().copy()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            first = logits.numpy(force=True), gradients
        steps.step()
        losses.append(loss.item())
    return *first, losses


def check(name, folder):
    """Logits and gradients; the losses of torch are returned."""
    torch_model = make(config_of(name))
    torch_model.save_pretrained(folder)
    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    ids = tokens()[:, :8]
    wanted, wanted_gradients, losses = torch_results(torch_model, ids)
    model = hf.load(folder)
    model.read_buffers()

    def loss(params, batch):
        return model.loss(params, batch).mean, model.logits(params, batch)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits), gradients = compiled(params, {"input_ids": ids})
    assert off(logits, wanted) < LOGITS
    largest = max(np.abs(g).max() for g in wanted_gradients.values())
    for path, gradient in wanted_gradients.items():
        scale = max(np.abs(gradient).max(), 1e-3 * largest)
        assert np.abs(gradients[path] - gradient).max() < GRADIENTS * scale, path
    return losses


@pytest.mark.parametrize("name", [*FIXED, *drawn(OTHERS, 3)])
def test_logits_gradients_and_losses_are_those_of_torch(name, tmp_path):
    """Losses with all arrays away from the device."""
    wanted = check(name, tmp_path / "model")
    batch = {"input_ids": tokens()[:, :8]}
    config = on_tier(FIXED.get(name, "host"), tmp_path)
    config["segment"] = {"max_bytes": 50_000, "remat": "always"}
    # A small gradient stays small with SGD.
    tx = optax.sgd(RATE, momentum=0.9)
    model = hf.load(tmp_path / "model")
    with hf.initialize(model, tx, config, batch=batch) as engine:
        losses = [engine.step(batch)["loss"] for _ in range(3)]
    assert losses == pytest.approx(wanted, rel=LOSSES)
    assert losses[2] < losses[0]


def test_attention_is_the_operation_unless_the_table_says_why(tmp_path):
    without = []
    for name in TABLE:
        config_of(name).save_pretrained(tmp_path / name)
        model, seen = hf.load(tmp_path / name), []

        def look(spec, operands, seen=seen):
            seen.append(spec)
            return "blocks"

        ids = jax.ShapeDtypeStruct((2, 8), np.int32)
        with choosing(look):
            jax.eval_shape(model.logits, model.zeros(), {"input_ids": ids})
        if not seen:
            without.append(name)
    assert without == [name for name in TABLE if name in OWN_ATTENTION]
