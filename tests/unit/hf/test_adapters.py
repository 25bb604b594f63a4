"""Adapters beside the frozen weights of models of `transformers`, and in folders."""

import json
import shutil

import numpy as np
import optax
import pytest

from tests.command import run
from tests.unit.hf.models import (
    NVFP4,
    STREAMED,
    TOLERANCE,
    VOCAB,
    change_files,
    data_file,
    gpt2,
    llama,
    metrics_of,
    mixtral,
    model_folder,
    off,
    on_tier,
    refusals,
    reloaded,
    save,
    to_nvfp4,
    tokenizer,
    tokens,
    torch_logits,
    torch_loss,
    write,
)
from tests.unit.hf.test_generate import COUNT, written

import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip
from safetensors.torch import save_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.adapter import SavedAdapter, naming_of  # isort: skip

BATCH = {"input_ids": tokens()}
SHAPE = {"rows": 2, "length": 16}
PROMPTS = [np.random.default_rng(0).integers(3, VOCAB, n) for n in (3, 9)]


def engine_of(folder, *, config=STREAMED, **adapter):
    config = config | {"adapter": {"r": 4, **adapter}}
    return hf.initialize(hf.load(folder), optax.adamw(1e-2), config, batch=BATCH)


# A model, the options of its adapters, and the tier where all arrays rest.
CASES = {
    "dora": (llama, {"use_dora": True, "modules_to_save": ["lm_head"]}, "device"),
    "nf4": (llama, {"quantize_base": "nf4", "use_rslora": True}, "nvme"),
    "transposed": (gpt2, {"quantize_base": "int8"}, "host"),
    "experts": (mixtral, {"quantize_base": "nf4"}, "nvme"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_merged_export_is_the_engine_and_so_is_the_adapter_alone(
    name, tmp_path, caplog
):
    """The first has the loss of the engine, and the other writes what the first does.

    A base in 4 bits is merged as it is decoded.
    """
    make_config, options, tier = CASES[name]
    begun = torch_loss(save(make_config(), tmp_path / "model"), tokens())
    config = on_tier(tier, tmp_path)
    with engine_of(tmp_path / "model", config=config, **options) as engine:
        first = engine.step(BATCH)["loss"]
        losses = [first, *(engine.step(BATCH)["loss"] for _ in range(2))]
        hf.export(engine, tmp_path / "tuned")
        trained = engine.evaluate(BATCH)
        hf.export_adapter(engine, tmp_path / "adapter")
    is_warned = "PEFT would compute wrong logits" in caplog.text
    assert is_warned == (name == "experts")
    # Dropout of GPT-2 is on in training; a base in 4 bits is another base.
    assert abs(first - begun) < (1e-6 if name == "dora" else 0.02)
    assert losses[-1] < first - 0.05
    merged = reloaded(tmp_path / "tuned")
    assert abs(torch_loss(merged, tokens()) - trained) < 2e-6
    model = hf.load(tmp_path / "adapter")
    with hf.open_model(model, on_tier(tier, tmp_path), **SHAPE) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=COUNT, rows=2)
        scores = engine.log_probabilities(BATCH)
    assert found == [written(merged, prompt) for prompt in PROMPTS]
    assert -np.mean(scores) == pytest.approx(trained, rel=1e-5)


# PEFT uses what transformers deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_an_adapter_of_peft_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    save(llama(), tmp_path / "base")
    reference = reloaded(tmp_path / "base")
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
    assert found == [written(wrapped, prompt) for prompt in PROMPTS]


# How PEFT adapts a weight that is embedding and output head, and whether it parts it.
TIED = {
    "saved in one place": ({"modules_to_save": ["embed_tokens"]}, True),
    "saved in both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, True),
    "the head": ({"target_modules": ["q_proj", "lm_head"]}, True),
    "the embedding": ({"target_modules": ["embed_tokens"]}, True),
    "both": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, False),
}


def scores_of(model) -> np.ndarray:
    """The log-probability of each token but the first, in torch."""
    ids = BATCH["input_ids"]
    scores = torch.log_softmax(torch.tensor(torch_logits(model, ids)), dim=-1).numpy()
    return np.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_is_adapted_where_peft_adapts_it(name, tmp_path):
    """It is parted if the adapter changes one place alone; training refuses that."""
    peft = pytest.importorskip("peft")
    options, is_parted = TIED[name]
    save(llama(tie_word_embeddings=True, num_hidden_layers=1), tmp_path / "base")
    reference = reloaded(tmp_path / "base")
    options = {"target_modules": ["q_proj"], **options}
    how = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(reference, how).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    wrapped.save_pretrained(tmp_path / "adapter")
    model = hf.load(tmp_path / "adapter", base=tmp_path / "base")
    assert (model.as_adapted() is not model) == is_parted
    with hf.open_model(model, {}, **SHAPE) as engine:
        found = engine.log_probabilities(BATCH)
    assert off(found, scores_of(wrapped)) < TOLERANCE
    if is_parted:
        targets = {k: x for k, x in options.items() if k != "ensure_weight_tying"}
        targets["begin_from"] = str(tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"(parts a tied weight|no parameter mat)"):
            engine_of(tmp_path / "base", **targets)


@pytest.mark.slow
def test_a_frozen_weight_beside_an_adapter_must_be_that_of_the_base(tmp_path):
    """PEFT writes it beside the factors of an embedding or a head, maybe rounded."""
    save(llama(num_hidden_layers=1), tmp_path / "base")
    model = hf.load(tmp_path / "base")
    naming = naming_of(model.module)
    files, weights = model.open_weights()
    adapter = SavedAdapter(tmp_path, {})
    with files:
        head = torch.tensor(weights.whole("lm_head.weight"))
        for frozen in (head, head.bfloat16(), 1.01 * head, head[:-1]):
            name = "base_model.model.lm_head.base_layer.weight"
            save_file({name: frozen}, tmp_path / "adapter_model.safetensors")
            if frozen is head or frozen.dtype == torch.bfloat16:
                adapter.check_frozen(weights, naming)
                continue
            wanted = r"by 1\.0%" if len(frozen) == VOCAB else r"the shape \[95, 32\]"
            with pytest.raises(ValueError, match=wanted):
                adapter.check_frozen(weights, naming)


@pytest.mark.slow
def test_one_length_of_a_tied_weight_is_refused(tmp_path):
    save(llama(tie_word_embeddings=True, num_hidden_layers=1), tmp_path / "base")
    with pytest.raises(NotImplementedError, match="are tied"):
        engine_of(tmp_path / "base", target_modules=["embed_tokens"], use_dora=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_peft_computes_the_same_with_an_adapted_embedding(key, is_tied, tmp_path):
    peft = pytest.importorskip("peft")
    config = llama(tie_word_embeddings=is_tied, num_hidden_layers=1)
    save(config, tmp_path / "base")
    options = {"target_modules": ["q_proj"]}
    options[key] = [*options.get(key, ()), "embed_tokens"]
    with engine_of(tmp_path / "base", **options) as engine:
        engine.step(BATCH)
        hf.export_adapter(engine, tmp_path / "adapter")
        found, loss = engine.log_probabilities(BATCH), engine.evaluate(BATCH)
    wrapped = peft.PeftModel.from_pretrained(
        reloaded(tmp_path / "base"), tmp_path / "adapter"
    )
    assert off(found, scores_of(wrapped.eval())) < TOLERANCE
    options["begin_from"] = str(tmp_path / "adapter")
    with engine_of(tmp_path / "base", **options) as engine:
        assert engine.evaluate(BATCH) == loss


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base, an adapter for its queries and values, and a loss with both."""
    folder = tmp_path_factory.mktemp("saved")
    save(llama(eos_token_id=None), folder / "base")
    with engine_of(folder / "base", target_modules=["q_proj", "v_proj"]) as engine:
        engine.step(BATCH)
        hf.export_adapter(engine, folder / "adapter")
        hf.export(engine, folder / "merged")
        (folder / "loss").write_text(repr(engine.evaluate(BATCH)))
    for name in ("base", "merged"):
        tokenizer().save_pretrained(folder / name)
    return folder


@pytest.mark.slow
def test_an_adapter_is_written_as_peft_does_and_continued(saved, tmp_path):
    config = json.loads((saved / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(saved / "base")
    assert config["task_type"] == "CAUSAL_LM" and config["peft_type"] == "LORA"
    found = load_file(saved / "adapter/adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
    assert found[name.format("A")].shape == (4, 32)
    assert found[name.format("B")].shape == (16, 4)
    assert len(found) == 2 * 2 * 2
    options = {"target_modules": ["q_proj", "v_proj"]}
    options["begin_from"] = str(saved / "adapter")
    with engine_of(saved / "base", **options) as engine:
        assert repr(engine.evaluate(BATCH)) == (saved / "loss").read_text()
    save(llama(num_hidden_layers=3), tmp_path / "other")
    with pytest.raises(ValueError, match="of another base: 'model.layers.2"):
        engine_of(tmp_path / "other", **options)


@pytest.mark.slow
def test_the_commands_take_an_adapter_and_its_base(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(path.read_text().replace(str(saved), str(tmp_path)))
    asked = ["--prompt", "w1 w2", "--max-new-tokens", 6]
    data = ["--data", write(tmp_path / "data.jsonl", [{"text": "w3 w1 w7"}])]
    found = run("generate", tmp_path / "adapter", *asked)
    words = tokenizer()
    ids = np.array(words("w1 w2").input_ids)
    made = written(reloaded(tmp_path / "merged"), ids)[:6]
    assert found.stdout == words.decode(made, skip_special_tokens=True) + "\n"
    refused = run(
        "finetune", tmp_path / "adapter", *data, "--output", tmp_path / "out", code=2
    )
    assert "has an adapter" in refused.output
    shutil.move(tmp_path / "base", tmp_path / "moved")
    refused = run("generate", tmp_path / "adapter", *asked, code=2)
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


# What adapter_config.json says instead.
CHANGES = {
    "another kind": {"peft_type": "IA3"},
    "biases": {"bias": "all"},
    "ranks": {"rank_pattern": {"q_proj": 8}},
    "values that change the base": {"init_lora_weights": "pissa"},
    "another task": {"task_type": "SEQ_CLS"},
    "no rank": {"r": "absent"},
    "another rank": {"r": 8},
    "no base": {"base_model_name_or_path": None},
    "an absent base": {"base_model_name_or_path": "/absent"},
}


@pytest.mark.slow
def test_what_cannot_be_read_is_refused_by_name(saved, tmp_path, golden):
    folder, base = tmp_path / "adapter", tmp_path / "base"

    def opened(changes, name=None, content=None, **options):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved / "adapter", folder)
        (folder / "zinf_adapter.json").unlink()
        path = folder / "adapter_config.json"
        settings = json.loads(path.read_text())
        settings |= {"base_model_name_or_path": str(base), **changes}
        kept = {key: x for key, x in settings.items() if x != "absent"}
        path.write_text(json.dumps(kept))
        if name is not None:
            (folder / "adapter_model.safetensors").unlink()
            (folder / name).write_bytes(b"")
        hf.open_model(hf.load(folder, **options), {}, **SHAPE)

    shutil.copytree(saved / "base", base)
    save(llama(num_hidden_layers=1), tmp_path / "shallow")
    mistakes = {
        name: lambda changes=changes: opened(changes)
        for name, changes in CHANGES.items()
    } | {
        "another base": lambda: opened({}, base=tmp_path / "shallow"),
        "no values": lambda: opened({}, "notes.txt"),
        "a pickle": lambda: opened({}, "adapter_model.bin"),
    }
    text = refusals(mistakes, tmp_path).splitlines()
    golden.check("adapters.txt", "\n".join(x.split(" (relative")[0] for x in text))


@pytest.mark.slow
@pytest.mark.parametrize("base", ["nf4", "nvfp4"])
def test_finetune_with_adapters_writes_them_and_the_merged_model(base, tmp_path):
    """Over a base that is encoded in nf4, or published in nvfp4."""
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    output = tmp_path / "tuned"
    common = ["--data", data, "--output", output, "--samples", 2]
    common += ["--sequence-length", 8, "--learning-rate", 3e-2, "--epochs", 6]
    options = ["--lora", 4, "--target-modules", "q_proj", "--target-modules", "up_proj"]
    options += ["--modules-to-save", "lm_head", "--use-dora"]
    if base == "nf4":
        options += ["--base-encoding", "nf4"]
    else:
        change_files(folder, to_nvfp4, NVFP4)
    done = run("finetune", folder, *common, *options)
    assert f"The adapter is in {output}.adapter." in done.output
    losses = [line["loss"] for line in metrics_of(tmp_path / "tuned.run")]
    assert losses[-1] < losses[0] / 2
    tuned = transformers.AutoModelForCausalLM.from_pretrained(output).float().eval()
    words = transformers.AutoTokenizer.from_pretrained(output)
    ids = np.array([words("w3 w1 w3").input_ids])
    assert words.decode([int(torch_logits(tuned, ids)[0, -1].argmax())]) == "w2"
    names = load_file(tmp_path / "tuned.adapter/adapter_model.safetensors")
    assert len(names) == 2 * 2 * 3 + 1
    checkpoints = tmp_path / "tuned.run/checkpoints"
    config = tmp_path / "tuned.run/finetune.yaml"
    for option, ours in (("--adapter", "tuned.adapter"), ("--merge", "tuned")):
        again = tmp_path / f"again{option}"
        done = run("checkpoint", "export", checkpoints, again, option, config)
        file = "adapter_model" if option == "--adapter" else "model"
        first = load_file(tmp_path / ours / f"{file}.safetensors")
        second = load_file(again / f"{file}.safetensors")
        assert first.keys() == second.keys()
        for name in first:
            kept = second[name].astype(first[name].dtype)
            assert np.array_equal(kept, first[name]), name
