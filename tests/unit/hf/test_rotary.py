"""Frequencies that depend on the length: by row, by type of layer, and what fails."""

import numpy as np
import pytest

from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import SMALL, TOLERANCE, make, off, params_of, save, tokens

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.rotary import switch_of  # isort: skip

LENGTH = 8
LONG = config_of("phi3 with longrope").rope_parameters
USUAL = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["phi3 beyond the switch of longrope", "llama beyond the limit of dynamic"]
)
def test_a_row_has_the_frequencies_of_its_own_last_position(name, tmp_path):
    """Six tokens are the limit: the second row, of two segments, stays below it."""
    torch_model = save(config_of(name), tmp_path)
    ids, rows = tokens()[:, :LENGTH], np.arange(LENGTH, dtype=np.int32)
    positions = np.stack([rows, rows % (LENGTH // 2)])
    batch = {"input_ids": ids, "position_ids": positions}
    batch["attention_mask"] = np.ones_like(ids)
    found = jax.jit(hf.load(tmp_path).logits)(params_of(torch_model), batch)
    for row in range(2):
        # A new model: torch keeps the frequencies of the longest sequence so far.
        alone = make(config_of(name))
        given = {n: torch.tensor(x[row : row + 1]).long() for n, x in batch.items()}
        with torch.no_grad():
            wanted = alone(**given, use_cache=False).logits.numpy()
        assert off(found[row : row + 1], wanted) < TOLERANCE


@pytest.mark.slow
def test_each_type_of_layer_has_its_own_frequencies(tmp_path):
    kinds = {"sliding_attention": USUAL, "full_attention": DYNAMIC}
    sizes = SMALL | {"max_position_embeddings": 6, "head_dim": 8, "sliding_window": 4}
    layers = {"layer_types": list(kinds), "initializer_range": 0.2}
    config = transformers.Gemma3TextConfig(**sizes, **layers, rope_parameters=kinds)
    torch_model = save(config, tmp_path)
    ids = tokens()[:, :LENGTH]
    with torch.no_grad():
        wanted = torch_model(torch.tensor(ids).long(), use_cache=False).logits.numpy()
    logits = jax.jit(hf.load(tmp_path).logits)
    found = logits(params_of(torch_model), {"input_ids": ids})
    assert off(found, wanted) < TOLERANCE


def test_lengths_are_those_that_the_frequencies_are_for(tmp_path):
    """`dynamic` stretches by its factor; `longrope` has a switch."""
    config_of("llama with dynamic").save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    assert model.max_length == 4 * 16
    assert switch_of(model.module) is None
    config_of("phi3 with longrope").save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    assert model.max_length == SMALL["max_position_embeddings"]
    assert switch_of(model.module) == 16


def test_an_embedding_that_decides_by_positions_is_refused_by_name(tmp_path):
    scales = {"short_mscale": 1.0, "long_mscale": 1.2}
    limits = {"original_max_position_embeddings": 16, "num_local_experts": 4}
    config = transformers.PhimoeConfig(**SMALL, **limits, rope_parameters=LONG | scales)
    config.save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    with pytest.raises(NotImplementedError, match="PhimoeRotaryEmbedding decides by"):
        jax.eval_shape(model.logits, model.zeros(), {"input_ids": tokens()})
