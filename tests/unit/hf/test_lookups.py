"""Embeddings have the gradients of torch, and are tiled, tied to the head or not."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from tests.marks import slow_except
from tests.unit.hf.models import llama, save, tokens

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from torchax import default_env  # isort: skip
from torchax.interop import jax_view, torch_view  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.engine import ModelEngine  # isort: skip
from zinf.executor.streamed import StreamedRunner  # isort: skip
from zinf.hf.lookups import look_up  # isort: skip
from zinf.program import Tier  # isort: skip
from zinf.segment import segment_loss, trace_loss  # isort: skip

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


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_padding_has_no_gradient_by_its_look_up_in_a_model(is_tied, tmp_path):
    torch_model = save(llama(tie_word_embeddings=is_tied), tmp_path)
    ids = tokens()
    ids[:, ::3] = PADDING
    given = torch.tensor(ids).long()
    torch_model(given, labels=given).loss.backward()
    model = hf.load(tmp_path)
    named = dict(torch_model.named_parameters())
    params = {n: jnp.asarray(p.numpy(force=True)) for n, p in named.items()}
    batch = {"input_ids": ids, "labels": ids}
    found = jax.jit(jax.grad(model.loss))(params, batch)[TABLE]
    wanted = named[TABLE].grad.numpy()
    assert np.abs(found - wanted).max() < GRADIENTS * np.abs(wanted).max()
    assert found[PADDING].any() == is_tied  # a head has a gradient for every word


def test_gradients_by_frequency_are_refused():
    with pytest.raises(NotImplementedError, match="scale_grad_by_freq"):
        look_up(torch.zeros(2, 2), torch.zeros(1).long(), scale_grad_by_freq=True)


@pytest.mark.parametrize("is_tied", slow_except([True], [True, False]))
def test_a_table_with_padding_is_read_by_tile(is_tied, tmp_path):
    llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    params = jax.eval_shape(model.zeros)
    ids = jax.ShapeDtypeStruct(tokens().shape, jnp.int32)
    source = trace_loss(model.loss, params, {"input_ids": ids}, max_remat_bytes=1 << 62)
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
TILED = {"max_bytes": TABLE_BYTES // 4, "remat": "always"}
BATCH = {"input_ids": np.random.default_rng(0).integers(3, WORDS, (1, ROWS), np.int32)}
ADAPTED = {"r": 4, "modules_to_save": ["norm"]}


def config_on(tier: str, folder: Path, **rest: Any) -> dict[str, Any]:
    device = {"device": "none", "host": "cpu", "nvme": "nvme"}[tier]
    nvme = {"nvme_path": str(folder / "nvme")} if tier == "nvme" else {}
    memory = {"device": "64MiB"}
    if tier != "device":
        memory = {"device": TABLE_BYTES - 1}
    if tier == "nvme":
        memory |= {"host": "3MiB"}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": device, **nvme},
            "offload_optimizer": {"device": device, **nvme},
            "stage3_param_persistence_threshold": 1,
        },
        "execution": "streamed",
        "segment": TILED,
        "memory": memory,
        **rest,
    }


def engine_on(tier: str, folder: Path, **rest: Any) -> ModelEngine:
    config = config_on(tier, folder, **rest)
    model = hf.load(folder / "model")
    return hf.initialize(model, optax.adamw(1e-2), config, batch=BATCH)


def trained(engine: ModelEngine) -> tuple[list[float], Any]:
    """The losses of three steps and of an evaluation, and the parameters."""
    losses = [engine.step(BATCH)["loss"] for _ in range(3)]
    return [*losses, engine.evaluate(BATCH)], engine.params()


def tiled_paths(engine: ModelEngine) -> set[str]:
    assert isinstance(engine._current, StreamedRunner)
    return {t.path for t in engine._current.passes.program.tilings}


def tied(folder: Path) -> None:
    sizes = {"vocab_size": WORDS, "num_hidden_layers": 1}
    config = llama(tie_word_embeddings=True, **sizes)
    save(config, folder / "model", shard="1GB")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, ADAPTED], ids=["whole", "adapted"])
def test_a_tied_table_larger_than_memory_trains_with_equal_bits(adapter, tmp_path):
    tied(tmp_path)
    rest = {} if adapter is None else {"adapter": adapter}
    with engine_on("device", tmp_path, segment={"remat": "always"}, **rest) as engine:
        assert not tiled_paths(engine)
        wanted, _ = trained(engine)
    found = {}
    for tier in ("device", "host", "nvme"):
        with engine_on(tier, tmp_path, **rest) as engine:
            assert any(path.endswith(TABLE) for path in tiled_paths(engine))
            found[tier] = trained(engine)
            peaks = engine.plan.peak_bytes
            assert tier == "device" or peaks[Tier.DEVICE] < TABLE_BYTES
    losses, params = found["device"]
    np.testing.assert_allclose(losses, wanted, rtol=TILES)
    for tier in ("host", "nvme"):
        assert found[tier][0] == losses
        jax.tree.map(np.testing.assert_array_equal, found[tier][1], params)


@pytest.mark.slow
def test_a_tiled_tied_table_is_saved_exported_and_generates(tmp_path):
    tied(tmp_path)
    with engine_on("nvme", tmp_path) as engine:
        engine.step(BATCH)
        engine.save(tmp_path / "saved")
        following = engine.step(BATCH)["loss"]
        engine.restore(tmp_path / "saved")
        assert engine.step(BATCH)["loss"] == following
        hf.export(engine, tmp_path / "tuned")
        loss = engine.evaluate(BATCH)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tuned", attn_implementation="eager"
    ).eval()
    ids = torch.tensor(BATCH["input_ids"]).long()
    with torch.no_grad():
        # One float32 sum over 7 tokens in another order.
        assert abs(float(loaded(ids, labels=ids).loss) - loss) < TILES * loss
        wanted = loaded.generate(ids, max_new_tokens=4, do_sample=False)[0, ROWS:]
    config = config_on("nvme", tmp_path)
    model = hf.load(tmp_path / "tuned")
    with hf.open_model(model, config, rows=1, length=ROWS + 4) as engine:
        made = engine.generate([*BATCH["input_ids"]], max_new_tokens=4, rows=1)
    assert made == [wanted.tolist()]
