"""Folders with an adapter alone: text and scores without merging any file."""

import json
import shutil

import numpy as np
import pytest

from tests.unit.hf.models import VOCAB, llama, mixtral, save, tokenizer
from tests.unit.hf.test_generate import settings, written
from tests.unit.hf.test_generate_command import run, write

import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.program import Tier  # isort: skip

SHAPE = {"rows": 2, "length": 16}
PROMPTS = [np.random.default_rng(0).integers(3, VOCAB, n) for n in (3, 9)]
COUNT = 10
RANDOM = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}


def adapter_of(folder, make_config, **options):
    """A base in `folder/base`, and an adapter of random numbers for it.

    Returns the models of torch, of the base alone and with the adapter merged.
    """
    base = save(make_config(), folder / "base")
    model = hf.load(folder / "base")
    config = {"adapter": RANDOM | options}
    with hf.open_model(model, config, **SHAPE) as engine:
        for path in engine.adapted.saved:
            value = engine.get(f"adapter/{path}")
            engine.set(f"adapter/{path}", np.roll(value, 1, axis=0))
        hf.export_adapter(engine, folder / "adapter")
        hf.export(engine, folder / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "merged", attn_implementation="eager"
    )
    return base, merged.eval()


def written_by(reference):
    return [written(reference, prompt) for prompt in PROMPTS]


CASES = {
    "lora": (llama, {}, (Tier.DEVICE, Tier.HOST, Tier.NVME)),
    "dora": (
        llama,
        {"use_dora": True, "modules_to_save": ["lm_head"], "quantize_base": "nf4"},
        (Tier.NVME,),
    ),
    "experts": (mixtral, {"use_rslora": True}, (Tier.HOST,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_merged_model_on_every_tier(name, tmp_path):
    make_config, options, tiers = CASES[name]
    base, merged = adapter_of(tmp_path, make_config, **options)
    wanted = written_by(merged)
    assert wanted != written_by(base)
    model = hf.load(tmp_path / "adapter")
    for tier in tiers:
        config = settings(tier.name.lower(), tmp_path / "nvme")
        with hf.open_model(model, config, **SHAPE) as engine:
            homes = engine.residents.homes
            assert {homes[a] for a in homes if ".0." in a.path} == {tier}
            assert engine.generate(PROMPTS, max_new_tokens=COUNT, rows=2) == wanted


# PEFT uses what transformers deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_an_adapter_of_peft_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    save(llama(), tmp_path / "base")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    how = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
        use_dora=True,
        layers_to_transform=[1],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(reference, how).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_B" in name or "lm_head" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    wrapped.save_pretrained(tmp_path / "adapter")
    with hf.open_model(hf.load(tmp_path / "adapter"), {}, **SHAPE) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=COUNT, rows=2)
    assert found == written_by(wrapped)


@pytest.mark.slow
def test_the_commands_take_an_adapter_and_its_base(tmp_path):
    _, merged = adapter_of(tmp_path, lambda: llama(eos_token_id=None))
    words = tokenizer()
    for folder in ("base", "merged"):
        words.save_pretrained(tmp_path / folder)
    asked = ["--prompt", "w1 w2", "--max-new-tokens", 6]
    data = ["--data", write(tmp_path / "data.jsonl", [{"text": "w3 w1 w7"}])]
    found = run("generate", tmp_path / "adapter", *asked)
    assert found.exit_code == 0, found.output
    made = written(merged, np.array(words("w1 w2").input_ids))[:6]
    assert found.stdout == words.decode(made, skip_special_tokens=True) + "\n"
    refused = run("finetune", tmp_path / "adapter", *data, "--output", tmp_path / "out")
    assert refused.exit_code == 2 and "has an adapter" in refused.output
    shutil.move(tmp_path / "base", tmp_path / "moved")
    refused = run("generate", tmp_path / "adapter", *asked)
    assert refused.exit_code == 2
    assert "base of the adapter" in refused.output and "--base" in refused.output
    losses = [
        run("evaluate", tmp_path / folder, *data, *options).stdout.split(",")[0]
        for folder, options in (
            ("adapter", ["--base", tmp_path / "moved"]),
            ("merged", []),
        )
    ]
    one, other = (float(text.removeprefix("loss ")) for text in losses)
    # Printed with 6 digits, and the last may be rounded the other way.
    assert one == pytest.approx(other, rel=2e-6)


def changed(settings, **changes):
    return {key: x for key, x in (settings | changes).items() if x != "absent"}


BAD = {
    "kind": ({"peft_type": "IA3"}, NotImplementedError, "peft_type = 'IA3'"),
    "bias": ({"bias": "all"}, NotImplementedError, "bias = 'all'"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, NotImplementedError, "rank_pattern"),
    "pissa": ({"init_lora_weights": "pissa"}, NotImplementedError, "'pissa'"),
    "task": ({"task_type": "SEQ_CLS"}, NotImplementedError, "task_type = 'SEQ_CLS'"),
    "no rank": ({"r": "absent"}, ValueError, "does not say the rank"),
    "no base": ({"base_model_name_or_path": None}, ValueError, "of which model"),
    "base": (
        {"base_model_name_or_path": "/absent"},
        FileNotFoundError,
        "base of the adapter in .*: There is no folder /absent",
    ),
    "rank": ({"r": 8}, ValueError, "another base: .*shape"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    adapter_of(folder, llama, target_modules=["q_proj"])
    (folder / "adapter/zinf_adapter.json").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_by_name(name, saved, tmp_path):
    changes, error, message = BAD[name]
    shutil.copytree(saved / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()), **changes)))
    with pytest.raises(error, match=message):
        hf.open_model(hf.load(tmp_path / "adapter"), {}, **SHAPE)


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused_by_name(saved, tmp_path):
    save(llama(num_hidden_layers=1), tmp_path / "shallow")
    model = hf.load(saved / "adapter", base=tmp_path / "shallow")
    with pytest.raises(ValueError, match="of another base: it has .*layers.1"):
        hf.open_model(model, {}, **SHAPE)
    save(llama(num_hidden_layers=3), tmp_path / "wide")
    with pytest.raises(ValueError, match="whole model, so base"):
        hf.load(tmp_path / "wide", base=tmp_path / "shallow")
    shutil.copytree(saved / "adapter", tmp_path / "empty")
    (tmp_path / "empty/adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no adapter_model.safetensors"):
        hf.open_model(hf.load(tmp_path / "empty"), {}, **SHAPE)
