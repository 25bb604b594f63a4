"""Adapters beside the frozen weights of models of `transformers`."""

import json

import numpy as np
import optax
import pytest

from tests.unit.hf.models import gpt2, llama, mixtral, save, tokens, torch_logits
from tests.unit.hf.test_commands import data_file, model_folder, run

import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.program import Tier  # isort: skip

BATCH = {"input_ids": tokens()}
DEEPSPEED = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}


def engine_of(folder, *, config=None, **adapter):
    config = STREAMED | (config or {}) | {"adapter": {"r": 4, **adapter}}
    return hf.initialize(hf.load(folder), optax.adamw(1e-2), config, batch=BATCH)


def loss_in_torch(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        ids = torch.tensor(tokens()).long()
        return float(model(ids, labels=ids).loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_config", "options"),
    [
        (llama, {"use_dora": True, "modules_to_save": ["lm_head"]}),
        (llama, {"quantize_base": "nf4", "use_rslora": True}),
        (gpt2, {"quantize_base": "int8"}),
        (mixtral, {"quantize_base": "nf4"}),
    ],
    ids=["dora", "nf4", "gpt2", "experts"],
)
def test_a_merged_export_has_the_loss_of_the_engine(
    make_config, options, tmp_path, caplog
):
    save(make_config(), tmp_path / "model")
    begun = loss_in_torch(tmp_path / "model")
    with engine_of(tmp_path / "model", **options) as engine:
        first = engine.step(BATCH)["loss"]
        losses = [first, *(engine.step(BATCH)["loss"] for _ in range(2))]
        hf.export(engine, tmp_path / "tuned")
        trained = engine.evaluate(BATCH)
        hf.export_adapter(engine, tmp_path / "adapter")
    is_warned = "PEFT would compute wrong logits" in caplog.text
    assert is_warned == (make_config is mixtral)
    # Dropout of GPT-2 is on in training; a base in 4 bits is another base.
    is_exact = make_config is not gpt2 and "quantize_base" not in options
    assert abs(first - begun) < (1e-6 if is_exact else 0.02)
    assert losses[-1] < first - 0.05
    assert abs(loss_in_torch(tmp_path / "tuned") - trained) < 2e-6


@pytest.mark.slow
def test_losses_are_equal_to_the_bit_on_every_tier(tmp_path):
    save(llama(), tmp_path / "model")
    losses = {}
    for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME):
        memory = {"nvme": str(tmp_path / f"nvme-{tier}")} if tier == Tier.NVME else {}
        offload = {"offload_param": {"device": DEEPSPEED[tier]}}
        config = {"zero_optimization": {"stage": 3, **offload}, "memory": memory}
        config["persistence_threshold"] = 0
        options = {"quantize_base": "nf4", "use_dora": True}
        with engine_of(tmp_path / "model", config=config, **options) as engine:
            homes = engine.residents.homes
            base = [t for a, t in homes.items() if a.path.endswith("/codes")]
            assert base and set(base) == {tier}
            losses[tier] = [engine.step(BATCH)["loss"] for _ in range(3)]
    assert losses[Tier.DEVICE] == losses[Tier.HOST] == losses[Tier.NVME]


@pytest.mark.slow
def test_an_adapter_is_written_as_peft_does_and_continued(tmp_path):
    save(llama(), tmp_path / "model")
    with engine_of(tmp_path / "model", target_modules=["q_proj", "v_proj"]) as engine:
        engine.step(BATCH)
        hf.export_adapter(engine, tmp_path / "adapter")
        loss = engine.evaluate(BATCH)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert config["task_type"] == "CAUSAL_LM" and config["peft_type"] == "LORA"
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
    assert found[name.format("A")].shape == (4, 32)
    assert found[name.format("B")].shape == (16, 4)
    assert len(found) == 2 * 2 * 2
    options = {"target_modules": ["q_proj", "v_proj"]}
    options["begin_from"] = str(tmp_path / "adapter")
    with engine_of(tmp_path / "model", **options) as engine:
        assert engine.evaluate(BATCH) == loss
    save(llama(num_hidden_layers=3), tmp_path / "other")
    with pytest.raises(ValueError, match="of another base: 'model.layers.2"):
        engine_of(tmp_path / "other", **options)


@pytest.mark.slow
def test_finetune_with_adapters_writes_them_and_the_merged_model(tmp_path):
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    output = tmp_path / "tuned"
    common = ["--data", data, "--output", output, "--samples", 2]
    common += ["--sequence-length", 8, "--learning-rate", 3e-2, "--epochs", 6]
    options = ["--lora", 4, "--target-modules", "q_proj", "--target-modules", "up_proj"]
    options += ["--modules-to-save", "lm_head", "--base-encoding", "nf4", "--use-dora"]
    done = run("finetune", folder, *common, *options)
    assert done.exit_code == 0, done.output
    assert f"The adapter is in {output}.adapter." in done.output
    lines = (tmp_path / "tuned.run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] / 2
    tuned = transformers.AutoModelForCausalLM.from_pretrained(output).float().eval()
    words = transformers.AutoTokenizer.from_pretrained(output)
    ids = np.array([words("w3 w1 w3").input_ids])
    assert words.decode([int(torch_logits(tuned, ids)[0, -1].argmax())]) == "w2"
    names = load_file(tmp_path / "tuned.adapter/adapter_model.safetensors")
    assert len(names) == 2 * 2 * 3 + 1
    checkpoints, config = tmp_path / "tuned.run/checkpoints", tmp_path / "tuned.run"
    config = config / "finetune.yaml"
    for option, ours in (("--adapter", "tuned.adapter"), ("--merge", "tuned")):
        again = tmp_path / f"again{option}"
        done = run("checkpoint", "export", checkpoints, again, option, config)
        assert done.exit_code == 0, done.output
        file = "adapter_model" if option == "--adapter" else "model"
        first = load_file(tmp_path / ours / f"{file}.safetensors")
        second = load_file(again / f"{file}.safetensors")
        assert first.keys() == second.keys()
        for name in first:
            kept = second[name].astype(first[name].dtype)
            assert np.array_equal(kept, first[name]), name


def test_options_of_adapters_need_a_rank(tmp_path):
    files = ["--data", data_file(tmp_path), "--output", tmp_path / "out"]
    done = run("finetune", "model", *files, "--use-dora")
    assert done.exit_code == 2
    assert "Add --lora RANK" in done.output
