"""Rows of several samples, of which none sees another, and layers that drop tokens."""

from functools import partial

import numpy as np
import pytest

from tests.unit.hf.models import (
    SMALL,
    STREAMED,
    TOKENS,
    TOLERANCE,
    VOCAB,
    gpt2,
    llama,
    make,
    mean_loss,
    off,
    params_of,
    save,
    tokens,
    torch_logits,
)

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

import optax  # isort: skip

import zinf  # isort: skip
from zinf import hf  # isort: skip
from zinf.hf.dataset import Samples  # isort: skip
from zinf.hf.packing import Packed  # isort: skip
from zinf.hf.dropping import layers_of  # isort: skip

ROOM, KEPT = 16, 7


def packed_batch():
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, ROOM), np.int32)
    segments = np.int32([[1] * 6 + [2] * 7 + [0] * 3, [1] * 4 + [2] * 4 + [3] * 8])
    return {"input_ids": ids, "segment_ids": segments}


def sliding():
    return transformers.MistralConfig(**SMALL, sliding_window=4)


@pytest.mark.slow
@pytest.mark.parametrize(("make_config", "has_mask"), [(gpt2, False), (sliding, True)])
def test_a_sample_does_not_change_the_next_one_in_its_row(
    make_config, has_mask, tmp_path
):
    torch_model = save(make_config(), tmp_path)
    model, params = hf.load(tmp_path), params_of(torch_model)
    batch = packed_batch()
    if has_mask:
        batch["attention_mask"] = np.int32(batch["segment_ids"] != 0)
    logits = jax.jit(model.logits)
    before = np.asarray(logits(params, batch))
    changed = batch | {"input_ids": batch["input_ids"].copy()}
    changed["input_ids"][0, :6] = 50 - changed["input_ids"][0, :6] % 40
    after = np.asarray(logits(params, changed))
    assert np.array_equal(after[0, 6:13], before[0, 6:13])
    assert np.array_equal(after[1], before[1])
    assert not np.array_equal(after[0, :6], before[0, :6])
    # A sample alone in its row gives the same logits up to rounding, in torch too.
    alone = torch_logits(torch_model, batch["input_ids"][:1, 6:13])[0]
    assert np.abs(alone - before[0, 6:13]).max() < 2e-6 * np.abs(before).max()


def test_no_token_is_predicted_from_another_sample(tmp_path):
    torch_model = save(llama(), tmp_path)
    model, batch = hf.load(tmp_path), packed_batch()
    total, count = 0.0, 0
    parts = ((0, 0, 6), (0, 6, 13), (0, 13, 16), (1, 0, 4), (1, 4, 8), (1, 8, 16))
    for row, first, last in parts:
        ids = torch.tensor(batch["input_ids"][row : row + 1, first:last]).long()
        with torch.no_grad():
            loss = torch_model(ids, labels=ids).loss
        total, count = (
            total + (last - first - 1) * float(loss),
            count + last - first - 1,
        )
    # A float32 sum over 26 tokens in another order.
    found = float(jax.jit(mean_loss(model))(params_of(torch_model), batch))
    assert abs(found - total / count) < 1e-5


LENGTHS = (16, 10, 6, 9, 7, 8, 5, 3)  # fill four rows of 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_packed", "num_microbatches", "num_devices"), [(True, 4, 1), (False, 2, 4)]
)
def test_a_token_counts_alike_packed_or_not_in_any_microbatch_and_device(
    is_packed, num_microbatches, num_devices, tmp_path
):
    """The loss and the gradient are those of all samples in one batch, each in a row.

    A few of the samples' tokens are prompts, which are not trained on.
    """
    torch_model = save(llama(num_hidden_layers=1), tmp_path)
    model, params = hf.load(tmp_path), params_of(torch_model)
    ids = np.random.default_rng(0).integers(3, VOCAB, sum(LENGTHS), np.int32)
    ids.tofile(tmp_path / "ids.int32")
    np.where(np.arange(len(ids)) % 5 < 2, hf.IGNORED, ids).tofile(
        tmp_path / "labels.int32"
    )
    np.save(tmp_path / "ends.npy", np.cumsum(LENGTHS))
    samples = Samples(tmp_path, length=ROOM, padding=2, first=0, last=len(LENGTHS))
    alone, packed = (
        jax.tree.map(lambda *x: np.stack(x), *(rows[i] for i in range(len(rows))))
        for rows in (samples, Packed(samples))
    )
    assert len(packed["labels"]) == 4
    expected, gradient = jax.jit(jax.value_and_grad(mean_loss(model)))(params, alone)
    batch = packed if is_packed else alone
    config = STREAMED | {
        "gradient_accumulation_steps": num_microbatches,
        "zero_optimization": {"stage": 3},
    }
    mesh = zinf.make_mesh(jax.devices()[:num_devices])
    arguments = model, optax.sgd(1.0), config
    with hf.initialize(*arguments, batch=batch, mesh=mesh) as engine:
        found = engine.step(batch)["loss"]
        new = engine.params()
        evaluated = engine.evaluate_weighted(batch)
    # A sum over 42 tokens, and of products of matrices, in another order.
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    for name, before in params.items():
        change = np.asarray(before) - np.asarray(new[name])
        np.testing.assert_allclose(change, gradient[name], rtol=1e-4, atol=2e-6)
    assert evaluated.weight == np.count_nonzero(alone["labels"][:, 1:] != hf.IGNORED)


MAMBA = transformers.MambaConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4
)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MAMBA, "keeps a state|layers of convolution"),
        (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4), "takes"),
    ],
    ids=["mamba", "bloom"],
)
def test_a_model_that_no_mask_parts_is_refused(config, reason, tmp_path):
    make(config).config.save_pretrained(tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=(1,))
    with pytest.raises(NotImplementedError, match=f"(?s)({reason}).*data.packing"):
        model.check_packing()
    with pytest.raises(NotImplementedError, match=f"cannot drop tokens.*({reason})"):
        model.check_dropping()


def kept_of(rows, layers):
    draw = np.random.default_rng(3).random((rows, layers, TOKENS))
    return np.sort(draw.argsort(axis=2)[..., :KEPT], axis=2).astype("i4")


def gemma2():
    sizes = SMALL | {"num_hidden_layers": 3}
    return transformers.Gemma2Config(**sizes, head_dim=8, sliding_window=4)


def drop_in_torch(layer, kept):
    """Run a layer of torch on the kept tokens of each row, one row after another."""
    forward = layer.forward

    def part(value, row, places):
        return value[min(row, len(value) - 1)][None][:, places]

    def run(hidden, *arguments, **named):
        after = hidden.clone()
        for row, places in enumerate(torch.tensor(kept).long()):
            cut = partial(part, row=row, places=places)
            few = dict(named)
            if (mask := few.get("attention_mask")) is not None:
                mask = mask[min(row, len(mask) - 1)][None]
                few["attention_mask"] = mask[:, :, places][:, :, :, places]
            if few.get("position_ids") is not None:
                few["position_ids"] = cut(few["position_ids"])
            if few.get("position_embeddings") is not None:
                few["position_embeddings"] = tuple(map(cut, few["position_embeddings"]))
            rest = [
                x[:, :, places][:, :, :, places] if getattr(x, "ndim", 0) == 4 else x
                for x in arguments
            ]
            found = forward(hidden[row : row + 1, places], *rest, **few)
            after[row, places] = (found[0] if isinstance(found, tuple) else found)[0]
        return after

    layer.forward = run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_config", "layers"), [(gpt2, (0, 1)), (gemma2, (0, 2))], ids=["gpt2", "gemma"]
)
def test_logits_are_those_of_torch_with_the_same_tokens_kept(
    make_config, layers, tmp_path
):
    torch_model = save(make_config(), tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=layers)
    params, ids, kept = params_of(torch_model), tokens(), kept_of(2, len(layers))
    logits = jax.jit(model.logits)
    whole = np.asarray(logits(params, {"input_ids": ids}))
    found = np.asarray(logits(params, {"input_ids": ids, "kept": kept}))
    for place, number in enumerate(layers):
        drop_in_torch(layers_of(torch_model)[number], kept[:, place])
    wanted = torch_logits(torch_model, ids)
    assert off(found, wanted) < TOLERANCE
    assert off(found, whole) > 1e-3
    # All tokens kept are no tokens dropped, and the module is as it was.
    every = np.tile(np.arange(TOKENS, dtype=np.int32), (2, len(layers), 1))
    same = np.asarray(logits(params, {"input_ids": ids, "kept": every}))
    assert off(same, whole) < TOLERANCE
    assert np.array_equal(whole, jax.jit(model.logits)(params, {"input_ids": ids}))


def test_dropped_tokens_see_no_other_sample_of_their_row(tmp_path):
    torch_model = save(llama(), tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=(0, 1))
    params, ids = params_of(torch_model), tokens(1)
    segments = np.int32([[1] * 5 + [2] * 7])
    batch = {"input_ids": ids, "segment_ids": segments, "kept": kept_of(1, 2)}
    logits = jax.jit(model.logits)
    before = np.asarray(logits(params, batch))
    ids = ids.copy()
    ids[0, :5] = 3 + ids[0, :5] % 7
    after = np.asarray(logits(params, batch | {"input_ids": ids}))
    assert np.array_equal(before[0, 5:], after[0, 5:])
    assert not np.array_equal(before[0, :5], after[0, :5])
    one = batch | {"kept": kept_of(1, 1)}
    with pytest.raises(ValueError, match=r"it must be \(rows, 2, tokens\)"):
        jax.eval_shape(model.logits, model.zeros(), one)
