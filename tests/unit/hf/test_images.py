"""Models that read images: what torch computes, trains and writes."""

import numpy as np
import optax
import pytest

from tests.marks import drawn
from tests.unit.hf.models import off, on_tier, params_of

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

from tests.unit.hf.images import (  # isort: skip
    TABLE,
    batch_of,
    in_torch,
    make,
    torch_loss,
)

import jax  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.images.kind import bucket_of, sizes  # isort: skip

# As for models of text: see `test_architectures`.
LOGITS, GRADIENTS, LOSSES = 2e-6, 1e-5, 1e-6
# No image, one and three; a row of three, beside which the others are filled.
COUNTS = (0, 1, 3)
FIXED = ("gemma3", "idefics3", "llava", "qwen2_5_vl")
OTHERS = [name for name in TABLE if name not in FIXED]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXED, *drawn(OTHERS, 1)])
def test_logits_and_gradients_are_those_of_torch(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path)
    batch, images = batch_of(model, COUNTS)
    model.check(batch)
    wanted = torch_model(**in_torch(name, batch, images), use_cache=False).logits
    torch_loss(wanted, batch["labels"]).backward()

    def loss(params, batch):
        return model.loss(params, batch).mean, model.logits(params, batch)

    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits), gradients = compiled(params, batch)
    assert off(logits, wanted.detach().numpy()) < LOGITS
    theirs = {n: p.grad for n, p in torch_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in theirs.values() if g is not None)
    for path, gradient in gradients.items():
        given = theirs[path]
        given = np.zeros_like(gradient) if given is None else given.numpy()
        scale = max(np.abs(given).max(), 1e-3 * largest)
        assert np.abs(gradient - given).max() < GRADIENTS * scale, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_a_batch_without_images_has_the_logits_of_torch(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    model = hf.load_with_images(tmp_path)
    batch, images = batch_of(model, (0, 0))
    model.check(batch)
    wanted = torch_model(**in_torch(name, batch, images), use_cache=False).logits
    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    logits = jax.jit(model.logits)(params, batch)
    assert off(logits, wanted.detach().numpy()) < LOGITS


@pytest.mark.slow
def test_losses_are_equal_to_the_bit_on_three_tiers_and_those_of_torch(tmp_path):
    name = "idefics3"
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path / "model")
    batch, images = batch_of(hf.load_with_images(tmp_path / "model"), COUNTS)
    found = {}
    for tier in ("device", "host", "nvme"):
        config = on_tier(tier, tmp_path)
        config["segment"] = {"max_bytes": 50_000, "remat": "always"}
        model = hf.load_with_images(tmp_path / "model")
        with hf.initialize(model, optax.sgd(0.1), config, batch=batch) as engine:
            found[tier] = [engine.step(batch)["loss"] for _ in range(3)]
    assert found["device"] == found["host"] == found["nvme"]
    steps = torch_model.named_parameters()
    import torch

    tx, wanted = torch.optim.SGD([p for _, p in steps], lr=0.1), []
    for _ in range(3):
        tx.zero_grad()
        logits = torch_model(**in_torch(name, batch, images), use_cache=False).logits
        loss = torch_loss(logits, batch["labels"])
        loss.backward()
        tx.step()
        wanted.append(loss.item())
    assert found["host"] == pytest.approx(wanted, rel=LOSSES)
    assert wanted[2] < wanted[0]


def test_buckets_are_few_and_never_half_empty():
    assert sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes(64, 4) == [4, 8, 12, 16, 24, 32, 48, 64]
    assert sizes(1) == [1]
    assert bucket_of(0, 5) == 1 and bucket_of(5, 5) == 5
    for room, unit in ((1000, 1), (16384, 4)):
        found = sizes(room, unit)
        assert all(
            b <= 2 * a and b % unit == 0 for a, b in zip(found, found[1:], strict=False)
        )
        assert len(found) < 2 * np.log2(room / unit) + 2
