"""Tiny random models of each architecture: logits, gradients, losses on all tiers."""

from pathlib import Path

import numpy as np
import optax
import pytest

from tests.unit.hf.architectures import FAILING, WORKING, config_of, slow_part
from tests.unit.hf.models import make, tokens

import jax  # isort: skip
import torch  # isort: skip

from zinf import hf  # isort: skip

# Both sides compute in float32. The largest entry of the logits is 1 here, and two
# layers round it a few times.
LOGITS = 2e-6
# A gradient is a sum over layers and tokens of products that were rounded before. Each
# leaf is compared with its own largest entry, or with a thousandth of that of all
# leaves: some gradients are 0 up to rounding, as those of the biases of keys.
GRADIENTS = 1e-5


def torch_results(model, ids):
    """Logits, and gradients of the mean loss of the next token by name."""
    ids = torch.tensor(ids).long()
    logits = model(ids, use_cache=False).logits
    targets = ids[:, 1:].reshape(-1)
    words = logits.shape[-1]
    flat = logits[:, :-1].reshape(-1, words).float()
    torch.nn.functional.cross_entropy(flat, targets).backward()
    gradients = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for name, p in model.named_parameters()
    }
    return logits.numpy(force=True), gradients


def results(model, params, ids):
    def loss(params, batch):
        return model.loss(params, batch), model.logits(params, batch)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits), gradients = compiled(params, {"input_ids": ids})
    return logits, gradients


def check(name, folder):
    torch_model = make(config_of(name))
    torch_model.save_pretrained(folder)
    ids = tokens()[:, :8]
    wanted, wanted_gradients = torch_results(torch_model, ids)
    model = hf.load(folder)
    model.read_buffers()
    params = {n: p.numpy(force=True) for n, p in torch_model.named_parameters()}
    logits, gradients = results(model, params, ids)
    assert np.abs(logits - wanted).max() < LOGITS * np.abs(wanted).max()
    largest = max(np.abs(g).max() for g in wanted_gradients.values())
    for path, gradient in wanted_gradients.items():
        scale = max(np.abs(gradient).max(), 1e-3 * largest)
        assert np.abs(gradients[path] - gradient).max() < GRADIENTS * scale, path


@pytest.mark.sampled(slow=8)
@pytest.mark.slow
@pytest.mark.parametrize("name", WORKING)
def test_logits_and_gradients_are_those_of_torch(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_what_fails_still_fails(name, tmp_path):
    """So that it moves to the table of what works when it does."""
    with pytest.raises(Exception):  # noqa: B017 - any failure, the table says which
        check(name, tmp_path)


def config_on(tier: str, folder: Path, execution: str = "streamed"):
    offload = {"device": "none" if tier == "device" else tier}
    offload["device"] = {"host": "cpu"}.get(tier, offload["device"])
    if tier == "nvme":
        offload["nvme_path"] = str(folder / "nvme")
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 1,
        },
        "segment": {"max_bytes": 50_000, "remat": "always"},
        "execution": execution,
    }


def losses_of(folder: Path, batch, config, rate):
    """Three losses of SGD with momentum, in which a small gradient stays small."""
    tx = optax.sgd(rate, momentum=0.9)
    with hf.initialize(hf.load(folder), tx, config, batch=batch) as engine:
        return [engine.step(batch)["loss"] for _ in range(3)]


# Both sides compute in float32, whose numbers near 4 are 2e-7 of them apart.
LOSSES = 1e-6
# Windows and soft caps, a state space, experts. Each takes 8 to 20 seconds of a
# processor, so the others are for `-m exhaustive`.
STREAMED = ("gemma2", "mamba2", "gpt_oss")


def torch_losses(model, ids, rate):
    steps = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    targets = torch.tensor(ids[:, 1:]).long().reshape(-1)
    losses = []
    for _ in range(3):
        steps.zero_grad()
        logits = model(torch.tensor(ids).long(), use_cache=False).logits[:, :-1]
        flat = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(flat, targets)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled(slow=len(STREAMED))
@pytest.mark.parametrize("name", slow_part(STREAMED))
def test_losses_are_equal_on_all_tiers(name, tmp_path):
    """And those of torch; a fused step is one program, so it rounds in its own way."""
    torch_model = make(config_of(name))
    folder = tmp_path / "model"
    torch_model.save_pretrained(folder)
    batch, rate = {"input_ids": tokens()[:, :8]}, 0.1
    device, host, nvme = (
        losses_of(folder, batch, config_on(tier, tmp_path), rate)
        for tier in ("device", "host", "nvme")
    )
    assert device == host == nvme
    assert device[2] < device[0]
    wanted = torch_losses(torch_model, batch["input_ids"], rate)
    assert device == pytest.approx(wanted, rel=LOSSES)
    fused = losses_of(folder, batch, config_on("device", tmp_path, "fused"), rate)
    assert fused == pytest.approx(wanted, rel=LOSSES)
