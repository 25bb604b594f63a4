"""`zinf finetune`, `zinf plan --model`, `zinf generate` and `zinf evaluate`."""

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from tests.command import run
from tests.unit.hf.models import (
    CHAT,
    VOCAB,
    WORDS,
    data_file,
    llama,
    make,
    metrics_of,
    model_folder,
    save,
    tokenizer,
    torch_logits,
    write,
)

import huggingface_hub  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from safetensors.numpy import load_file  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli.finetune import model_config  # isort: skip
from zinf.cli.outputs import JsonLines  # isort: skip
from zinf.core.config import Config  # isort: skip
from zinf.core.memory.lock_file import lock_beside, locked  # isort: skip
from zinf.core.plan import show_bytes  # isort: skip

# Embedding and head; attention, MLP and norms of two layers; the last norm.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
COUNT = 2 * VOCAB * 32 + 2 * LAYER + 32


@pytest.mark.slow
def test_a_model_is_tuned_and_loads_in_transformers(tmp_path):
    """On rows of several samples; another set is evaluated."""
    folder, data = model_folder(tmp_path), data_file(tmp_path, count=12)
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(data.read_text().splitlines()[:10]))
    output = tmp_path / "tuned"
    # Partly by TRL's names.
    common = ["--data", data, "--output_dir", output, "--max_length", 12, "--packing"]
    common += ["--per_device_train_batch_size", 2, "--learning-rate", 2e-2]
    # The steps of the schedule follow from the epochs.
    common += ["--lr_scheduler_type", "linear", "--warmup_ratio", 0.2]
    done = run("finetune", folder, *common, "--epochs", 6, "--eval-data", held)
    assert f"The tuned model is in {output}, in float32." in done.output
    assert "evaluation data: 10 samples" in done.output
    metrics = metrics_of(tmp_path / "tuned.run")
    # Twelve samples of five tokens, two in a row: six rows, two a step.
    steps = [line for line in metrics if "loss" in line]
    assert len(steps) == 6 * 6 // 2
    # Both of a row are trained on: the answer of two tokens, and its end.
    assert steps[0]["tokens_seen"] == 2 * 2 * 3
    rates = [line["learning_rate"] for line in steps]
    # As of transformers: warm-up is ceil(0.2 * 18) steps, and 14 are left after it.
    expected = [i / 4 for i in range(4)] + [(18 - i) / 14 for i in range(4, 18)]
    np.testing.assert_allclose(rates, 2e-2 * np.array(expected), 1e-5, 1e-8)
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert steps[-1]["evaluation_loss"] < steps[0]["loss"] / 2
    config = yaml.safe_load((tmp_path / "tuned.run/finetune.yaml").read_text())
    assert config["model"] == {"huggingface": str(folder)}
    tuned = transformers.AutoModelForCausalLM.from_pretrained(output).float().eval()
    words = transformers.AutoTokenizer.from_pretrained(output)
    ids = np.array([words("w3 w1 w3").input_ids])
    # All completions end so.
    assert words.decode([int(torch_logits(tuned, ids)[0, -1].argmax())]) == "w2"
    # As the files were, from the masters.
    assert tuned.config.dtype == torch.float32
    # What vLLM and llama.cpp's convert_hf_to_gguf.py read.
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        path.name for path in output.iterdir()
    }
    assert len(words) <= config["vocab_size"] == VOCAB
    card = (output / "README.md").read_text()
    assert "* data: `data.jsonl`" in card
    assert "* data: `held.jsonl (evaluation)`" in card
    assert f"* steps: {len(steps)}\n* loss of the last step: " in card
    assert f"evaluation: {steps[-1]['evaluation_loss']:.4g}" in card
    assert "Command: `zinf train config.yaml`" in card
    assert str(tmp_path) not in card
    again = run("finetune", folder, *common, code=2)
    assert "is there already" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_run_of_two_steps_changes_the_weights_in_the_dtype_of_the_files(
    dtype, tmp_path
):
    folder, data, output = model_folder(tmp_path), data_file(tmp_path), tmp_path / "out"
    make(llama(), dtype=dtype).save_pretrained(folder, max_shard_size="20KB")
    common = ["--data", data, "--steps", 2, "--samples", 3]
    common += ["--learning-rate", 1e-2]
    run("finetune", folder, *common, "--output", output)
    rates = [line["learning_rate"] for line in metrics_of(tmp_path / "out.run")]
    assert rates == pytest.approx([1e-2, 5e-3])
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(x, dtype="auto")
        for x in (folder, output)
    )
    assert after.dtype == dtype == after.config.dtype
    # Adam's first updates are as large as the learning rate.
    name = "model.layers.0.mlp.up_proj.weight"
    change = after.get_parameter(name) - before.get_parameter(name)
    assert change.abs().mean() > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("merges", [True, False])
def test_a_folder_with_adapters_alone_has_the_tokenizer(merges, tmp_path):
    folder, data, output = model_folder(tmp_path), data_file(tmp_path), tmp_path / "out"
    # As of old models: which class it is follows from config.json.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["tokenizer_class"]
    path.write_text(json.dumps(settings))
    common = ["--data", data, "--output", output, "--steps", 1, "--samples", 3]
    run("finetune", folder, *common, "--lora", 2, *["--no-merge"][merges:])
    alone = tmp_path / "out.adapter" if merges else output
    words = transformers.AutoTokenizer.from_pretrained(alone)
    assert words.chat_template == CHAT
    assert words("w3 w1").input_ids == tokenizer()("w3 w1").input_ids
    assert not (alone / "config.json").exists()
    # vLLM reads these names, and no lengths of DoRA or whole modules beside them.
    names = load_file(alone / "adapter_model.safetensors")
    end = r"base_model\.model\.model\.layers\.\d\..*_proj\.lora_[AB]\.weight"
    assert all(re.fullmatch(end, name) for name in names)
    settings = json.loads((alone / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["peft_type"] == "LORA"


@pytest.mark.slow
def test_the_best_of_a_run_may_be_exported(tmp_path):
    """The rate is so high that the last step is not the best."""
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    common = ["--data", data, "--samples", 3, "--learning-rate", 0.1]
    common += [
        "--eval-data",
        data,
        "--eval-steps",
        1,
        "--lr_scheduler_type",
        "constant",
    ]
    best, shorter = tmp_path / "best", tmp_path / "shorter"
    ended = ["--load_best_model_at_end", "true", "--steps", 4]
    done = run("finetune", folder, *common, *ended, "--output", best)
    losses = [line["evaluation_loss"] for line in metrics_of(tmp_path / "best.run")]
    step = 1 + int(np.argmin(losses))
    assert step < 4
    assert f"The best evaluation was after step {step}, which is exp" in done.output
    run("finetune", folder, *common, "--steps", step, "--output", shorter)
    one, other = (load_file(x / "model.safetensors") for x in (best, shorter))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert f"* steps: {step}\n" in (best / "README.md").read_text()


class FakeHub:
    """The client of the hub, which records what it is asked for."""

    asked: list[tuple] = []

    def whoami(self):
        return {"name": "somebody"}

    def create_repo(self, name, *, private, exist_ok):
        self.asked.append(("create", name, private))
        assert exist_ok
        return SimpleNamespace(repo_id=f"somebody/{name.rpartition('/')[2]}")

    def upload_folder(self, *, folder_path, repo_id, commit_message, delete_patterns):
        names = {path.name for path in Path(folder_path).iterdir()}
        # Weights in one file, in several, and adapters, beside what is no zinf's.
        there = [
            *("model.safetensors", "model-00001-of-00002.safetensors", "LICENSE"),
            *("model.safetensors.index.json", "onnx/model.safetensors"),
            *("adapter_model.safetensors", "adapter_config.json", "config.json"),
        ]
        gone = {x for x in there for p in delete_patterns if fnmatch(x, p)}
        self.asked.append(("upload", repo_id, names, set(there) - gone))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.mark.slow
def test_a_tuned_model_is_uploaded_when_it_is_complete(tmp_path, monkeypatch):
    folder, data, output = model_folder(tmp_path), data_file(tmp_path), tmp_path / "out"
    common = ["--data", data, "--output", output, "--steps", 1, "--samples", 3]
    common += ["--push_to_hub", "--hub_private_repo", "true"]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    refused = run("finetune", folder, *common, code=2)
    assert "to be uploaded to out, and nobody is logged in" in refused.output
    assert not (tmp_path / "out.run").exists()
    refused = run("finetune", folder, *common, "--hub_model_id", "a/b/c", code=2)
    assert "run.hub_model_id is 'a/b/c', which is no name" in refused.output
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    done = run("finetune", folder, *common, "--hub_model_id", "me/mine")
    assert "is uploaded: https://hub/somebody/mine/commit/1" in done.output
    created, (_, name, files, kept) = FakeHub.asked
    assert created == ("create", "me/mine", True)
    assert name == "somebody/mine"
    assert files >= {"README.md", "config.json", "tokenizer.json", "model.safetensors"}
    # A reader would take old weights in one file before new ones in several.
    assert kept == {"LICENSE", "onnx/model.safetensors", "config.json"}


# Neither a token that fills up rows nor, in the second case, one that ends texts.
@pytest.mark.parametrize("ends, filled", [({}, 1), ({"eos_token": None}, 0)])
def test_rows_need_no_token_of_padding(ends, filled, tmp_path):
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    tokenizer(**ends).save_pretrained(folder)
    raw = model_config(str(folder), data=[data_file(tmp_path)], sequence_length=8)
    config = Config.load(raw, [f"run.output={tmp_path / 'run'}"])
    row = hf.Task(config).rows()[0]
    words = [WORDS.index(word) for word in ("w0", "w1", "w0", "w2")]
    text = [*words, 1] if filled else words
    fill = 8 - len(text)
    assert row["input_ids"].tolist() == [*text, *[filled] * fill]
    assert row["labels"].tolist() == [-100, -100, *text[2:], *[-100] * fill]


@pytest.mark.slow
def test_a_config_json_alone_is_planned_for_training_and_for_generation(tmp_path):
    sizes = {"max_position_embeddings": 2048, "dtype": "bfloat16"}
    llama(**sizes).save_pretrained(tmp_path)
    nvme = ["--set", f"memory.nvme={tmp_path / 'nvme'}", "--model", tmp_path]
    done = run("plan", *nvme, "--set", "execution=streamed")
    assert f"{COUNT:,} parameters, 1,024 tokens a step, bfloat16" in done.output
    assert "a day are written to the drives" in done.output
    llama(max_position_embeddings=256).save_pretrained(tmp_path / "short")
    done = run("plan", "--model", tmp_path / "short", "--samples", 2)
    assert f"{COUNT:,} parameters, 512 tokens a step, bfloat16" in done.output
    nvme += ["--set", "zero_optimization.offload_param.device=nvme"]
    nvme += ["--set", "persistence_threshold=1", "--max-new-tokens", 4]
    done = run("plan", "--generate", *nvme, "--prompt-length", 16, "--batch-sizes=1,16")
    # In the two bytes of the dtype that its weights would have.
    size = show_bytes(2 * COUNT)
    assert f"{COUNT:,} parameters, {size}, prompts of 16 tokens" in done.output
    lines = [line for line in done.stdout.splitlines() if f"  {size}  " in line]
    assert [line.split()[0] for line in lines] == ["1", "16"]


def test_wrong_commands_are_refused_before_samples_are_read(tmp_path):
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    output = ["--data", data, "--output", tmp_path / "tuned"]
    path = tmp_path / "config.yaml"
    path.write_text("model: {huggingface: some/model, num_layers: 2}\n")
    pairs = [{"prompt": "w0", "chosen": "w20 w21", "rejected": "w22"}]
    preferences = ["--data", write(tmp_path / "pairs.jsonl", pairs)]
    preferences += ["--output", tmp_path / "tuned", "--objective", "dpo"]
    preferences += ["--sequence-length", 8]
    for arguments, message in (
        (["plan", path], "model.num_layers: has no effect: huggingface names"),
        (
            ["plan", "--model", folder, "--sequence-length", 33],
            "was made for 32 tokens",
        ),
        (["finetune", "model", *output, "--use-dora"], "Add --lora RANK"),
        (["finetune", folder, *preferences, "--packing"], "data.packing"),
    ):
        done = run(*arguments, code=2)
        assert message in done.output, done.output
    sorted(folder.glob("*.safetensors"))[1].unlink()
    done = run("finetune", folder, *output, code=2)
    assert "samples" not in done.output
    assert f"{folder} lacks model-00002-of-" in done.output


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    reference = save(llama(eos_token_id=None), folder)
    tokenizer(chat_template=CHAT).save_pretrained(folder)
    return folder, reference


def completion(reference, words, prompt, count, end):
    """What torch writes after a prompt."""
    ids = words(prompt, return_tensors="pt").input_ids
    options = {"do_sample": False, "eos_token_id": end, "pad_token_id": 2}
    whole = reference.generate(ids, max_new_tokens=count, **options)
    return words.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_a_completion_alone_is_on_the_standard_output(model, tmp_path):
    folder, reference = model
    words = hf.load(folder).tokenizer
    asked = ["generate", folder, "--prompt", "w1 w2", "--max-new-tokens", 6]
    ids = {"--raw": "w1 w2", "--chat": "u: w1 w2 a:"}
    for option, text in ids.items():
        found = run(*asked, option)
        wanted = completion(reference, words, text, 6, words.eos_token_id)
        assert found.stdout == wanted + "\n"
        assert ("ended the text at once" in found.stderr) == (not wanted)
    # The tokenizer has a chat template.
    assert run(*asked).stdout == found.stdout
    lookup = "--prompt-lookup-num-tokens", 3
    assert run(*asked, *lookup).stdout == found.stdout
    small = model_folder(tmp_path / "small", num_hidden_layers=1)
    drawn = *asked, "--temperature", 0.8, "--seed", 3
    for how in (asked, drawn):
        drafted = run(*how, "--draft", small, "--draft-num-tokens", 2)
        assert drafted.stdout == run(*how).stdout
    refused = run(*asked, "--draft", small, *lookup, code=2)
    assert "Give one of --draft and --prompt-lookup-num-tokens" in refused.output
    tokenizer(chat_template=CHAT, additional_special_tokens=["<x>"]).save_pretrained(
        small
    )
    refused = run(*asked, "--draft", small, code=2)
    assert re.search("another vocabulary.*46 and 45 words, and '<x>'", refused.output)


@pytest.mark.slow
def test_a_model_may_have_no_token_that_pads_or_ends_a_text(model, tmp_path):
    folder, reference = model
    words = tokenizer()
    words.pad_token = words.eos_token = None
    words.save_pretrained(folder)
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "w1 w2 w3"}, {"prompt": "w5"}])
    output = tmp_path / "out.jsonl"
    rest = ["--output", output, "--max-new-tokens", 5, "--temperature", 0, "--raw"]
    found = run("generate", folder, "--prompts", prompts, *rest)
    assert "no token that ends a text (eos_token_id): each" in found.stderr
    for line in map(json.loads, output.read_text().splitlines()):
        wanted = completion(reference, words, line["prompt"], 5, None)
        assert line["completion"] == wanted


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(model, tmp_path):
    folder, _ = model
    lines = [
        {"prompt": "w1 w2", "id": 7},
        {"messages": [{"role": "user", "content": "w5"}]},
        {"prompt": "w7"},
    ]
    prompts, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    asked = ["generate", folder, "--prompts", prompts, "--output", output]
    asked += ["--max-new-tokens", 6, "--temperature", 0.8, "--batch-size", 2]
    run(*asked)
    content = output.read_text()
    made = [json.loads(line) for line in content.splitlines()]
    assert [{k: v for k, v in m.items() if k != "completion"} for m in made] == lines
    # A kill in the middle of the second line.
    output.write_text(content[: len(content) // 2])
    run(*asked)
    assert output.read_text() == content
    output.write_text(json.dumps({"prompt": "other", "completion": ""}) + "\n")
    refused = run(*asked, code=2)
    assert "line 1: it is no completion" in refused.output
    # Other settings and other weights are named, and recorded where they are allowed.
    whole = content.splitlines(keepends=True)
    output.write_text(whole[0] + whole[1])
    other = [7 if x == 6 else x for x in asked]
    refused = run(*other, code=2)
    assert "  max_new_tokens: 6 -> 7" in refused.output
    assert "--allow-changed max_new_tokens" in refused.output
    assert output.read_text() == whole[0] + whole[1]
    (tensors,) = sorted(folder.glob("*.safetensors"))[:1]
    before = tensors.read_bytes()
    tensors.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    refused = run(*asked, code=2)
    assert "  model.weights: " in refused.output
    tensors.write_bytes(before)
    run(*other, "--allow-changed", "max_new_tokens")
    assert output.read_text().startswith(whole[0] + whole[1])
    record = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    change = {"after_lines": 2, "changed": {"max_new_tokens": [6, 7]}}
    assert record["changes"] == [change]
    # Who else writes there is named.
    output.write_text(whole[0])
    with locked({output: lock_beside(output)}, change="wait"):
        refused = run(*asked, code=2)
    assert f"process {os.getpid()} on host" in refused.output
    assert output.read_text() == whole[0]
    assert not lock_beside(output).exists()


def completions(count=1):
    columns = [("completion",)] * count
    return JsonLines([{"prompt": "w1"}] * count, columns, "completion")


FOREIGN = {
    "a JSON file on one line": b'{"a": 1}',
    "a line of prompts": b'{"prompt": "w1"}',
    "text": b"Dear diary",
    "lines of text": b"Dear diary\nend",
    "another prompt's": b'{"prompt": "w2", "completion": "w',
    "too many": b'{"prompt": "w1", "completion": "w2"}\n{',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_an_output_that_is_not_of_the_prompts_is_refused_untouched(tmp_path, content):
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    with pytest.raises(ValueError, match="is no completion of .* left as it is"):
        completions().found(output)
    assert output.read_bytes() == content


@pytest.mark.parametrize("count", range(len('{"prompt": "w1", "completion": "w2"}')))
def test_a_line_that_was_cut_short_anywhere_is_known(tmp_path, count):
    output, line = (
        tmp_path / "out.jsonl",
        completions().written(0, {"completion": "w2"}),
    )
    output.write_bytes(line + line[:count])
    assert completions(2).found(output) == (1, len(line))


def test_the_prompts_are_not_the_output_by_any_name(tmp_path):
    prompts, link = write(tmp_path / "in.jsonl", [{"prompt": "w1"}]), tmp_path / "link"
    link.symlink_to(prompts)
    for output in (prompts, link):
        found = run(
            "generate", "model", "--prompts", prompts, "--output", output, code=2
        )
        assert "names the file of prompts" in found.output
    assert json.loads(prompts.read_text()) == {"prompt": "w1"}


@pytest.mark.slow
def test_the_loss_of_held_out_lines_is_that_of_torch(model, tmp_path):
    """Weights in 8 and 4 bits change the loss a little."""
    folder, reference = model
    data = data_file(tmp_path, count=10)
    values = []
    for bits in ((), ("--weight-bits", 8), ("--weight-bits", 4)):
        found = run("evaluate", folder, "--data", data, *bits)
        values.append(float(found.stdout.split(",")[0].removeprefix("loss ")))
    words, losses = hf.load(folder).tokenizer, []
    for line in map(json.loads, data.read_text().splitlines()):
        prompt = words(line["prompt"]).input_ids
        ids = [*prompt, *words(line["completion"]).input_ids, words.eos_token_id]
        logits = torch.tensor(torch_logits(reference, np.array([ids])))
        scores = torch.log_softmax(logits[0, :-1], -1).numpy()
        losses += [-scores[i - 1, ids[i]] for i in range(len(prompt), len(ids))]
    # Printed with 6 digits; float32 logits of torch and jax differ by rounding.
    plain, eight, four = values
    assert plain == pytest.approx(float(np.mean(losses)), rel=1e-5)
    assert f"{len(losses)} tokens of 10 samples" in found.stdout
    assert 0 < abs(eight - plain) < abs(four - plain) < 0.1
    # The same lines as an array, behind a prompt that is longer than the model takes.
    lines = [{"prompt": "w1 " * 40, "completion": "w2"}]
    lines += map(json.loads, data.read_text().splitlines())
    array = tmp_path / "data.json"
    array.write_text(json.dumps(lines))
    found = run("evaluate", folder, "--data", array, "--too-long", "drop")
    assert "of the lines with more than 32 tokens 1 left out" in found.stdout
    assert f"loss {plain:.6g}" in found.stdout
    found = run("generate", folder, "--prompt", "w1", "--weight-bits", 3, code=2)
    assert "num_bits" in found.output


BAD = [
    ('{"prompt": ""}', "line 1: prompt must be a text that is not empty"),
    ('{"text": "w1"}', "line 1: a line must have prompt"),
    ('{"prompt": "w1"}\n{', "line 2: no JSON"),
    ("\n", "there is no line to read"),
    ('{"messages": [{"role": "user", "content": "w1"}]}', "no chat template"),
    ('{"prompt": "w1 w1"}', "Prompt 0 has 2 tokens.*32 that the model was made for"),
]


def test_bad_lines_of_prompts_are_refused_by_name(model, tmp_path):
    folder, _ = model
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    prompts = tmp_path / "in.jsonl"
    rest = ["--output", tmp_path / "out.jsonl", "--max-new-tokens", 31]
    for content, message in BAD:
        prompts.write_text(content)
        found = run("generate", folder, "--prompts", prompts, *rest, code=2)
        assert re.search(message, found.output), found.output


def test_settings_beside_the_model_hold_unless_others_are_given(model):
    folder, _ = model
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": 4}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded = hf.load(folder)
    found = hf.settings_of(loaded, {"top_k": None, "top_p": 0.9})
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.9)
    assert found.eos_token_ids == (4,)
    assert hf.settings_of(loaded, {"temperature": 0.0}).is_greedy
    assert hf.lookup_of(loaded, {}) is None
    assert hf.lookup_of(loaded, {"prompt_lookup_num_tokens": 3}).num_tokens == 3
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    with pytest.raises(NotImplementedError, match="num_beams = 4"):
        hf.settings_of(loaded, {})
