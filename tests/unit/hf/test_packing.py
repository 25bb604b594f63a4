"""Several samples in a row: which share one, and that none sees another."""

import numpy as np
import pytest

from tests.unit.hf.models import SMALL, VOCAB, gpt2, llama, make, mixtral, save

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.dataset import Samples  # isort: skip
from zinf.hf.packing import Packed, rows_of  # isort: skip

ROOM = 16


def test_rows_hold_each_sample_once_and_no_more_than_fits():
    lengths = np.random.default_rng(0).integers(1, ROOM + 1, 500)
    rows = rows_of(lengths, ROOM)
    assert sorted(i for row in rows for i in row) == list(range(500))
    filled = [sum(int(lengths[i]) for i in row) for row in rows]
    assert max(filled) <= ROOM
    # At most 11/9 of the fewest rows and 6/9 more, which is the bound of fitting the
    # longest first (Johnson 1973); the fewest rows hold all tokens.
    assert len(rows) <= 11 / 9 * np.ceil(lengths.sum() / ROOM) + 6 / 9
    assert rows == rows_of(lengths, ROOM)


def test_a_packed_row_numbers_samples_and_positions(tmp_path):
    samples = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    flat = np.concatenate([np.int32(s) for s in samples])
    flat.tofile(tmp_path / "ids.int32")
    flat.tofile(tmp_path / "labels.int32")
    np.save(tmp_path / "ends.npy", np.cumsum([len(s) for s in samples]))
    packed = Packed(Samples(tmp_path, length=8, padding=2, first=0, last=3))
    assert len(packed) == 2
    first = packed[0]
    assert first["input_ids"].tolist() == [10, 11, 12, 13, 5, 6, 7, 2]
    assert first["labels"].tolist() == [-100, 11, 12, 13, -100, 6, 7, -100]
    assert first["segment_ids"].tolist() == [1] * 4 + [2] * 3 + [0]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert all(x.dtype == np.int32 for x in first.values())


def packed_batch():
    random = np.random.default_rng(0)
    ids = random.integers(3, VOCAB, (2, ROOM), np.int32)
    segments = np.int32([[1] * 6 + [2] * 7 + [0] * 3, [1] * 4 + [2] * 4 + [3] * 8])
    return {"input_ids": ids, "segment_ids": segments}


def sliding():
    return transformers.MistralConfig(**SMALL, sliding_window=4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make_config", [llama, gpt2, sliding, mixtral])
@pytest.mark.parametrize("has_mask", [False, True], ids=["", "mask"])
def test_a_sample_does_not_change_the_next_one_in_its_row(
    make_config, has_mask, tmp_path
):
    torch_model = save(make_config(), tmp_path)
    model = hf.load(tmp_path)
    params = {
        n: jnp.asarray(p.numpy(force=True)) for n, p in torch_model.named_parameters()
    }
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
    # A sample alone in its row gives the same logits up to rounding.
    alone = {"input_ids": batch["input_ids"][:1, 6:13]}
    off = np.abs(np.asarray(jax.jit(model.logits)(params, alone))[0] - before[0, 6:13])
    assert off.max() < 2e-6 * np.abs(before).max()


@pytest.mark.slow
def test_no_token_is_predicted_from_another_sample(tmp_path):
    torch_model = save(llama(), tmp_path)
    model = hf.load(tmp_path)
    params = {
        n: jnp.asarray(p.numpy(force=True)) for n, p in torch_model.named_parameters()
    }
    batch = packed_batch()
    apart = [
        {"input_ids": batch["input_ids"][row : row + 1, first:last]}
        for row, first, last in ((0, 0, 6), (0, 6, 13), (0, 13, 16), (1, 0, 4))
    ] + [{"input_ids": batch["input_ids"][1:, a:b]} for a, b in ((4, 8), (8, 16))]
    counts = [x["input_ids"].shape[1] - 1 for x in apart]
    losses = [float(jax.jit(model.loss)(params, x)) for x in apart]
    wanted = np.dot(counts, losses) / sum(counts)
    # A float32 sum over 26 tokens in another order.
    assert abs(float(jax.jit(model.loss)(params, batch)) - wanted) < 1e-5


MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig(**MAMBA), "keeps a state|layers of convolution"),
        (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4), "takes"),
    ],
    ids=["mamba", "bloom"],
)
def test_a_model_that_cannot_keep_samples_apart_is_refused(config, reason, tmp_path):
    make(config).config.save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    with pytest.raises(NotImplementedError, match=f"(?s)({reason}).*data.packing"):
        model.check_packing()
