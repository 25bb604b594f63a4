"""Adapters beside architectures of the table, without naming a weight."""

import numpy as np
import pytest

from tests.unit.hf.architectures import config_of, slow_part
from tests.unit.hf.models import make, tokens

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.adapt import adapt  # isort: skip
from zinf.config.adapter import Adapter  # isort: skip
from zinf.hf.export import write_model  # isort: skip
from zinf.hf.weights import spec_of  # isort: skip
from zinf.interchange.tensors import AbstractTensors  # isort: skip

# Transposed weights, and stacked experts. Each takes 10 to 20 seconds of a processor,
# so the others are for `-m exhaustive`.
NAMES = ("gpt2", "gpt_oss")
# Both sides compute in float32, and add the adapter before the product or after it.
# The largest entry of the logits is 1 here.
LOGITS = 2e-6


class Arrays(AbstractTensors):
    """Arrays in memory, as an export reads them."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.specs = {n: spec_of(torch.tensor(x)) for n, x in arrays.items()}

    def block(self, name):
        return self.arrays[name].shape

    def read(self, name, box):
        return np.ascontiguousarray(self.arrays[name][tuple(slice(*b) for b in box)])


def check(name, folder):
    make(config_of(name)).save_pretrained(folder / "base")
    model = hf.load(folder / "base")
    model.read_buffers()
    files, weights = model.open_weights()
    with files:
        base = {path: weights.whole(path) for path in model.specs}
    batch = {"input_ids": tokens()[:, :8]}
    adapted = adapt(model.loss, base, Adapter(r=4), batch=batch)
    params = adapted.params

    def loss(adapter, frozen):
        return adapted.loss_fn({"base": frozen, "adapter": adapter}, batch)

    gradients = jax.jit(jax.grad(loss))(params["adapter"], params["base"])
    # As the first step of Adam. Factors A have no gradient yet, as B is 0.
    params["adapter"] = jax.tree.map(
        lambda x, g: x - 0.03 * np.sign(g), params["adapter"], gradients
    )
    found = jax.jit(adapted.applied(model.logits))(params, batch)
    write_model(Arrays(adapted.merge(params)), model, folder / "merged")
    logits = []
    for place in ("base", "merged"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder / place, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            ids = torch.tensor(batch["input_ids"]).long()
            logits.append(loaded(ids, use_cache=False).logits.numpy())
    before, merged = logits
    largest = np.abs(merged).max()
    # What is compared is more than the base, by far.
    assert np.abs(merged - before).max() > 1e4 * LOGITS * largest
    assert np.abs(found - merged).max() < LOGITS * largest


@pytest.mark.sampled(slow=len(NAMES))
@pytest.mark.parametrize("name", slow_part(NAMES))
def test_a_merged_export_has_the_logits_of_the_adapters(name, tmp_path):
    check(name, tmp_path)
