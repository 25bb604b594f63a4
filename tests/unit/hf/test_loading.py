"""Where each weight of a mixture comes from, and what memory it takes to read it."""

import tracemalloc
from collections import Counter

import numpy as np
import optax
import pytest

from tests.unit.hf.models import SMALL, mixtral, on_tier, params_of, save, tokens

import transformers  # isort: skip
from safetensors.numpy import load_file, save_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.memory.nvme.chunk_file import ChunkFile  # isort: skip
from zinf.hf.engine import ModelEngine  # isort: skip
from zinf.hf.weights import Conversion  # isort: skip

pytestmark = pytest.mark.slow
BATCH = {"input_ids": tokens()}


def deepseek_v3():
    parts = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    parts |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_shared_experts": 1}
    routes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    routes |= {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    return transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4}, **parts, **routes
    )


def gpt_oss():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.GptOssConfig(**SMALL, **sizes)


# Experts one by one in the files, beside shared ones and a bias of the router that
# torch does not train, and stacked.
MIXTURES = [mixtral, deepseek_v3, gpt_oss]


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nobody has written reads as NaN, in every floating dtype."""
    empty = np.empty

    def poison(*args, **named):
        found = empty(*args, **named)
        if not found.dtype.hasobject:
            found.reshape(-1).view(np.uint8)[...] = 0xFF
        return found

    monkeypatch.setattr(np, "empty", poison)
    assert np.isnan(np.empty(3, np.float32)).all()


def opened(folder, tmp_path, tier="host"):
    model, config = hf.load(folder), on_tier(tier, tmp_path)
    return hf.initialize(model, optax.sgd(0.1), config, batch=BATCH)


@pytest.mark.parametrize("make_config", MIXTURES)
def test_no_weight_of_a_mixture_is_random_deepspeed_7848_transformers_43257(
    make_config, tmp_path, poisoned
):
    wanted = params_of(save(make_config(), tmp_path / "model"))
    with opened(tmp_path / "model", tmp_path) as engine:
        found = engine.params()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def edited(folder, change):
    """A model in one file, of whose tensors `change` adds or removes some."""
    save(mixtral(), folder, shard="1GB")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def test_an_expert_without_a_tensor_is_refused_by_name(tmp_path):
    """transformers 5 would train random weights in its place (deepspeed 7848)."""
    edited(tmp_path / "model", lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        opened(tmp_path / "model", tmp_path)


def test_a_tensor_without_a_place_is_named(tmp_path, caplog):
    name = EXPERT.replace("w1", "w9")

    def change(tensors):
        tensors[name] = tensors[EXPERT]

    edited(tmp_path / "model", change)
    with opened(tmp_path / "model", tmp_path):
        assert "1 tensors of the files are not read" in caplog.text
        assert f"no place for them: {name}" in caplog.text


def test_loading_a_mixture_holds_a_few_experts_transformers_47514(
    tmp_path, monkeypatch
):
    """Not a layer and not the model: the peak is counted where weights are read."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 16}
    config = transformers.MixtralConfig(**SMALL | sizes)
    save(config, tmp_path / "model", shard="5MB")
    expert = 3 * sizes["hidden_size"] * sizes["intermediate_size"] * 4
    initialize, run = ModelEngine.initialize_state, Conversion.run
    peaks, converted = [], []

    def measured(engine):
        tracemalloc.start()
        try:
            initialize(engine)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    def counted(conversion, tensors, model):
        done = run(conversion, tensors, model)
        given = [x for found in tensors.values() for x in found]
        if not given[0].is_meta:
            converted.append(sum(x.nbytes for x in (*given, *done.values())))
        return done

    monkeypatch.setattr(ModelEngine, "initialize_state", measured)
    monkeypatch.setattr(Conversion, "run", counted)
    with opened(tmp_path / "model", tmp_path, "nvme"):
        pass
    # gate and up of one expert as read, and the same stacked.
    assert max(converted) == 2 * expert * 2 // 3
    assert len(converted) == 2 * 2 * 16
    # A part that is read and one that is written, each with its copies, and Python's
    # own objects. A layer has 16 experts, and the model 32.
    assert peaks[0] < 8 * expert


def test_chunks_of_a_mixture_are_written_once_and_not_read(tmp_path, monkeypatch):
    """Experts come one by one, and a chunk holds several of them."""
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_local_experts": 20}
    config = transformers.MixtralConfig(**SMALL | sizes | {"num_hidden_layers": 1})
    wanted = params_of(save(config, tmp_path / "model", shard="5MB"))
    writes, reads, write = Counter(), Counter(), ChunkFile.write

    def counted(chunk, *arguments):
        writes[chunk.path] += 1
        write(chunk, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkFile, "write", counted)
        patch.setattr(ChunkFile, "_read_whole", lambda chunk, *_: reads.update([chunk]))
        engine = opened(tmp_path / "model", tmp_path, "nvme")
    with engine:
        assert not reads
        assert set(writes.values()) == {1}
        # 20 and 10 MiB of experts, in chunks of at most 16 MiB.
        experts = [path for path in writes if path.stat().st_size > 2**22]
        assert len(experts) == 2 + 1
        for name, value in wanted.items():
            np.testing.assert_array_equal(engine.get(name), value, err_msg=name)
