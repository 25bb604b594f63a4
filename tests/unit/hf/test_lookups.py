"""Embeddings have the gradients of torch, and are tiled, tied to the head or not."""

import numpy as np
import optax
import pytest

from tests.unit.hf.models import (
    llama,
    mean_loss,
    on_tier,
    params_of,
    reloaded,
    save,
    tokens,
    torch_loss,
)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
from torchax import default_env  # isort: skip
from torchax.interop import jax_view, torch_view  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.step.run.streamed import StreamedRunner  # isort: skip
from zinf.hf.lookups import look_up  # isort: skip
from zinf.core.program import Tier  # isort: skip
from zinf.core.segment import segment_loss, trace_loss  # isort: skip

TABLE = "model.embed_tokens.weight"
PADDING = llama().pad_token_id
# The bound of test_architectures, for gradients of two layers in float32.
GRADIENTS = 1e-5
# The bound of tests/equivalence/test_tiling: sums over tiles are in another order.
TILES = 1e-5


@pytest.mark.parametrize("padding", [None, 0, 6])
def test_a_look_up_has_the_rows_and_the_gradient_of_torch(padding):
    table, weights = (
        np.random.default_rng(i).normal(size=s).astype("f4")
        for i, s in enumerate(((7, 3), (2, 4, 3)))
    )
    ids = np.array([[0, 6, 3, 3], [6, 1, 0, 6]])
    given = torch.tensor(table, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor(ids), given, padding_idx=padding)
    (rows * torch.tensor(weights)).sum().backward()

    def weighted(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        with default_env():
            number = -1 if padding is None else padding
            found = look_up(
                torch_view(table), torch_view(jnp.asarray(ids, "i4")), number
            )
        return jnp.sum(jax_view(found) * weights), jax_view(found)

    gradient, found = jax.grad(weighted, has_aux=True)(jnp.asarray(table))
    np.testing.assert_array_equal(found, rows.detach())
    # Rows are summed over at most three look-ups.
    np.testing.assert_allclose(gradient, given.grad, rtol=1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_padding_has_no_gradient_by_its_look_up_in_a_model(is_tied, tmp_path):
    torch_model = save(llama(tie_word_embeddings=is_tied), tmp_path)
    ids = tokens()
    ids[:, ::3] = PADDING
    given = torch.tensor(ids).long()
    torch_model(given, labels=given).loss.backward()
    model = hf.load(tmp_path)
    batch = {"input_ids": ids, "labels": ids}
    found = jax.jit(jax.grad(mean_loss(model)))(params_of(torch_model), batch)[TABLE]
    wanted = dict(torch_model.named_parameters())[TABLE].grad.numpy()
    assert np.abs(found - wanted).max() < GRADIENTS * np.abs(wanted).max()
    assert found[PADDING].any() == is_tied  # a head has a gradient for every word


def test_gradients_by_frequency_are_refused():
    with pytest.raises(NotImplementedError, match="scale_grad_by_freq"):
        look_up(torch.zeros(2, 2), torch.zeros(1).long(), scale_grad_by_freq=True)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_table_with_padding_is_read_by_tile(is_tied, tmp_path):
    llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    params = jax.eval_shape(model.zeros)
    ids = jax.ShapeDtypeStruct(tokens().shape, jnp.int32)
    source = trace_loss(
        mean_loss(model), params, {"input_ids": ids}, max_remat_bytes=1 << 62
    )
    limit = model.specs[TABLE].nbytes // 3
    cut = {"frozen": (), "splittable": params.keys(), "max_bytes": limit}
    program = segment_loss(source, **cut).program
    assert not program.untiled
    tilings = {t.path: t for t in program.tilings}
    uses = ("looked up", "in the loss") if is_tied else ("looked up",)
    assert tilings[TABLE].uses == uses and len(tilings[TABLE].tiles) == 3


# A table of 512 KiB in tiles of 128 KiB, and a device without room for it.
WORDS, ROWS = 4096, 8
TABLE_BYTES = WORDS * 32 * 4
BATCH = {"input_ids": np.random.default_rng(0).integers(3, WORDS, (1, ROWS), np.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"r": 4, "modules_to_save": ["norm"]}])
def test_a_tied_table_larger_than_memory_trains_and_generates(adapter, tmp_path):
    """It is saved and restored, and its export is read by another model."""
    sizes = {"vocab_size": WORDS, "num_hidden_layers": 1}
    save(llama(tie_word_embeddings=True, **sizes), tmp_path / "model", shard="1GB")
    whole, config = on_tier("device", tmp_path), on_tier("nvme", tmp_path)
    config["segment"] = {"max_bytes": TABLE_BYTES // 4, "remat": "always"}
    config["memory"] |= {"device": TABLE_BYTES - 1, "host": "3MiB"}
    losses, tiled = [], []
    for one in (whole, config):
        given = one | ({} if adapter is None else {"adapter": adapter})
        model = hf.load(tmp_path / "model")
        with hf.initialize(model, optax.adamw(1e-2), given, batch=BATCH) as engine:
            assert isinstance(engine._runners.current, StreamedRunner)
            tilings = engine._runners.current.passes.program.tilings
            tiled.append(any(t.path.endswith(TABLE) for t in tilings))
            losses.append([engine.step(BATCH)["loss"] for _ in range(2)])
            if one is whole:
                continue
            assert engine.plan.peak_bytes[Tier.DEVICE] < TABLE_BYTES
            if adapter is not None:
                continue
            engine.save(tmp_path / "saved")
            following = engine.step(BATCH)["loss"]
            engine.restore(tmp_path / "saved")
            assert engine.step(BATCH)["loss"] == following
            hf.export(engine, tmp_path / "tuned")
            loss = engine.evaluate(BATCH)
    assert tiled == [False, True]
    np.testing.assert_allclose(losses[0], losses[1], rtol=TILES)
    if adapter is not None:
        return
    loaded = reloaded(tmp_path / "tuned")
    # One float32 sum over 7 tokens in another order.
    assert torch_loss(loaded, BATCH["input_ids"]) == pytest.approx(loss, rel=TILES)
    ids = torch.tensor(BATCH["input_ids"]).long()
    with torch.no_grad():
        wanted = loaded.generate(ids, max_new_tokens=4, do_sample=False)[0, ROWS:]
    model = hf.load(tmp_path / "tuned")
    with hf.open_model(model, config, rows=1, length=ROWS + 4) as engine:
        made = engine.generate([*BATCH["input_ids"]], max_new_tokens=4, rows=1)
    assert made == [wanted.tolist()]
