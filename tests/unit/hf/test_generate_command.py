"""`zinf generate` and `zinf evaluate`."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.unit.hf.models import CHAT, llama, save, tokenizer, torch_logits

import torch  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli import app  # isort: skip


def run(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    reference = save(llama(eos_token_id=None), folder)
    tokenizer(chat_template=CHAT).save_pretrained(folder)
    return folder, reference


def write(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.slow
def test_a_completion_alone_is_on_the_standard_output(model):
    folder, reference = model
    words = hf.load(folder).tokenizer
    ids = words("w1 w2", return_tensors="pt").input_ids
    found = run("generate", folder, "--prompt", "w1 w2", "--max-new-tokens", 6)
    assert found.exit_code == 0, found.output
    options = {"do_sample": False, "eos_token_id": words.eos_token_id}
    whole = reference.generate(ids, max_new_tokens=6, pad_token_id=2, **options)
    wanted = words.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    assert found.stdout == wanted + "\n"


@pytest.mark.slow
def test_a_model_may_have_no_token_that_pads_or_ends_a_text(model, tmp_path):
    folder, reference = model
    words = tokenizer()
    words.pad_token = words.eos_token = None
    words.save_pretrained(folder)
    prompts = write(tmp_path / "in.jsonl", [{"prompt": "w1 w2 w3"}, {"prompt": "w5"}])
    output = tmp_path / "out.jsonl"
    rest = ["--output", output, "--max-new-tokens", 5, "--temperature", 0]
    found = run("generate", folder, "--prompts", prompts, *rest)
    assert found.exit_code == 0, found.output
    assert "no token that ends a text (eos_token_id): each" in found.stderr
    for line in map(json.loads, output.read_text().splitlines()):
        ids = words(line["prompt"], return_tensors="pt").input_ids
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        whole = reference.generate(ids, max_new_tokens=5, **options)
        assert line["completion"] == words.decode(
            whole[0, ids.shape[1] :], skip_special_tokens=True
        )


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
    done = run(*asked)
    assert done.exit_code == 0, done.output
    content = output.read_text()
    made = [json.loads(line) for line in content.splitlines()]
    assert [{k: v for k, v in m.items() if k != "completion"} for m in made] == lines
    # A kill in the middle of the second line.
    output.write_text(content[: len(content) // 2])
    assert run(*asked).exit_code == 0
    assert output.read_text() == content
    output.write_text(json.dumps({"prompt": "other", "completion": ""}) + "\n")
    refused = run(*asked)
    assert refused.exit_code == 2 and "line 1: it is no completion" in refused.output


@pytest.mark.slow
def test_the_loss_of_held_out_lines_is_that_of_torch(model, tmp_path):
    folder, reference = model
    lines = [{"prompt": f"w{i} w1", "completion": f"w{i} w2"} for i in range(10)]
    data = write(tmp_path / "data.jsonl", lines)
    found = run("evaluate", folder, "--data", data)
    assert found.exit_code == 0, found.output
    words, losses = hf.load(folder).tokenizer, []
    for line in lines:
        prompt = words(line["prompt"]).input_ids
        ids = [*prompt, *words(line["completion"]).input_ids, words.eos_token_id]
        logits = torch.tensor(torch_logits(reference, np.array([ids])))
        scores = torch.log_softmax(logits[0, :-1], -1).numpy()
        losses += [-scores[i - 1, ids[i]] for i in range(len(prompt), len(ids))]
    loss = float(found.stdout.split(",")[0].removeprefix("loss "))
    # Printed with 6 digits; float32 logits of torch and jax differ by rounding.
    assert loss == pytest.approx(float(np.mean(losses)), rel=1e-5)
    assert f"{len(losses)} tokens of 10 samples" in found.stdout


@pytest.mark.slow
def test_weights_in_few_bits_change_the_loss_a_little(model, tmp_path):
    folder, _ = model
    data = write(tmp_path / "data.jsonl", [{"text": f"w{i} w1 w2"} for i in range(8)])
    losses = []
    for bits in ((), ("--weight-bits", 8), ("--weight-bits", 4)):
        found = run("evaluate", folder, "--data", data, *bits)
        assert found.exit_code == 0, found.output
        losses.append(float(found.stdout.split(",")[0].removeprefix("loss ")))
    plain, eight, four = losses
    assert 0 < abs(eight - plain) < abs(four - plain) < 0.1
    found = run("generate", folder, "--prompt", "w1", "--weight-bits", 3)
    assert found.exit_code == 2 and "num_bits" in found.output


BAD = [
    ('{"prompt": ""}', "line 1: prompt must be a text that is not empty"),
    ('{"text": "w1"}', "line 1: a line must have prompt"),
    ('{"prompt": "w1"}\n{', "line 2: no JSON"),
    ("\n", "there is no line to read"),
    ('{"messages": [{"role": "user", "content": "w1"}]}', "no chat template"),
    ('{"prompt": "w1 w1"}', "Prompt 0 has 2 tokens.*32 that the model was made for"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_line_is_refused_by_name(content, message, model, tmp_path):
    folder, _ = model
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(content)
    rest = ["--output", tmp_path / "out.jsonl", "--max-new-tokens", 31]
    found = run("generate", folder, "--prompts", prompts, *rest)
    assert found.exit_code == 2
    assert re.search(message, found.output), found.output


@pytest.mark.slow
def test_settings_beside_the_model_hold_unless_others_are_given(model):
    folder, _ = model
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": 4}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded = hf.load(folder)
    found = hf.settings_of(loaded, {"top_k": None, "top_p": 0.9})
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.9)
    assert found.eos_token_ids == (4,)
    assert hf.settings_of(loaded, {"temperature": 0.0}).is_greedy
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    with pytest.raises(NotImplementedError, match="num_beams = 4"):
        hf.settings_of(loaded, {})
