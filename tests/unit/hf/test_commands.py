"""`zinf finetune` and `zinf plan --model`."""

import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.hf.models import (
    CHAT,
    VOCAB,
    WORDS,
    llama,
    save,
    tokenizer,
    torch_logits,
)

import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli import app  # isort: skip
from zinf.cli.finetune import model_config  # isort: skip
from zinf.config import Config  # isort: skip
from zinf.plan import show_bytes  # isort: skip


def run(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def model_folder(tmp_path):
    folder = tmp_path / "model"
    save(llama(), folder)
    tokenizer(chat_template=CHAT).save_pretrained(folder)
    return folder


def data_file(tmp_path, count=6):
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"w{i} w1", "completion": f"w{i} w2"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.slow
def test_a_model_is_tuned_and_loads_in_transformers(tmp_path):
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    output = tmp_path / "tuned"
    common = ["--data", data, "--output", output, "--samples", 2]
    common += ["--sequence-length", 8, "--learning-rate", 1e-2]
    done = run("finetune", folder, *common, "--epochs", 4)
    assert done.exit_code == 0, done.output
    assert f"The tuned model is in {output}." in done.output
    metrics = (tmp_path / "tuned.run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    # Four epochs of six samples, two a step.
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
    config = yaml.safe_load((tmp_path / "tuned.run/finetune.yaml").read_text())
    assert config["model"] == {"huggingface": str(folder)}
    tuned = transformers.AutoModelForCausalLM.from_pretrained(output).float().eval()
    words = transformers.AutoTokenizer.from_pretrained(output)
    ids = np.array([words("w3 w1 w3").input_ids])
    # All completions end so.
    assert words.decode([int(torch_logits(tuned, ids)[0, -1].argmax())]) == "w2"
    assert tuned.config.dtype == torch.bfloat16
    again = run("finetune", folder, *common)
    assert again.exit_code == 2 and "is there already" in again.output


def test_files_are_refused_before_samples_are_read(tmp_path):
    folder, data = model_folder(tmp_path), data_file(tmp_path)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    done = run("finetune", folder, "--data", data, "--output", tmp_path / "tuned")
    assert done.exit_code == 2
    assert f"{folder} lacks model-00002-of-" in done.output
    assert "samples" not in done.output


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
def test_packed_rows_are_trained_on_and_an_evaluation_set_is_evaluated(tmp_path):
    folder, data = model_folder(tmp_path), data_file(tmp_path, count=12)
    held = tmp_path / "held.jsonl"
    held.write_text(data.read_text())
    common = ["--data", data, "--eval-data", held, "--output", tmp_path / "tuned"]
    common += ["--samples", 2, "--sequence-length", 12, "--learning-rate", 1e-2]
    done = run("finetune", folder, *common, "--packing", "--epochs", 6)
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "tuned.run/metrics.jsonl").read_text().splitlines()
    metrics = list(map(json.loads, lines))
    # Twelve samples of five tokens, two in a row: six rows, two a step.
    steps = [line for line in metrics if "loss" in line]
    assert len(steps) == 6 * 6 // 2
    # Both of a row are trained on: the answer of two tokens, and its end.
    assert steps[0]["tokens_seen"] == 2 * 2 * 3
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert steps[-1]["evaluation_loss"] < steps[0]["loss"] / 2


@pytest.mark.slow
def test_a_config_json_alone_is_planned(tmp_path):
    llama(max_position_embeddings=2048).save_pretrained(tmp_path)
    nvme = ["--set", f"memory.nvme={tmp_path / 'nvme'}", "--set", "execution=streamed"]
    done = run("plan", "--model", tmp_path / "config.json", *nvme)
    assert done.exit_code == 0, done.output
    # Embedding and head; attention, MLP and norms of two layers; the last norm.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    count = 2 * VOCAB * 32 + 2 * layer + 32
    assert f"{count:,} parameters, 1,024 tokens a step, bfloat16" in done.output
    assert "a day are written to the drives" in done.output
    long = run("plan", "--model", tmp_path, "--sequence-length", 4096)
    assert long.exit_code == 2
    assert "was made for 2,048 tokens" in long.output


def test_sizes_beside_a_model_of_the_hub_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {huggingface: some/model, num_layers: 2}\n")
    done = run("plan", path)
    assert done.exit_code == 2
    assert "model.num_layers: has no effect: huggingface names" in done.output


@pytest.mark.slow
def test_generation_of_a_config_json_alone_is_planned(tmp_path):
    llama(max_position_embeddings=64, dtype="bfloat16").save_pretrained(tmp_path)
    nvme = ["--set", f"memory.nvme={tmp_path / 'nvme'}"]
    nvme += ["--set", "zero_optimization.offload_param.device=nvme"]
    nvme += ["--set", "persistence_threshold=1"]
    lengths = ["--prompt-length", 16, "--max-new-tokens", 4, "--batch-sizes", "1,16"]
    model = tmp_path / "config.json"
    done = run("plan", "--model", model, "--generate", *lengths, *nvme)
    assert done.exit_code == 0, done.output
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    count = 2 * VOCAB * 32 + 2 * layer + 32
    # In the two bytes of the dtype that its weights would have.
    size = show_bytes(2 * count)
    assert f"{count:,} parameters, {size}, prompts of 16 tokens" in done.output
    lines = [line for line in done.stdout.splitlines() if f"  {size}  " in line]
    assert [line.split()[0] for line in lines] == ["1", "16"]
