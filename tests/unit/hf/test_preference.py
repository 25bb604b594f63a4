"""Answers that were chosen against rejected ones."""

import json
from math import log

import numpy as np
import optax
import pytest

from tests.unit.hf.models import CHAT, VOCAB, llama, save, tokenizer, tokens
from tests.unit.hf.test_commands import model_folder, run
from tests.unit.hf.test_samples import END, turns

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.hf.preference import PairTokenizing  # isort: skip


def pairs(**changes):
    settings = {
        "sequence_length": 8,
        "truncates": False,
        "completion_only": True,
        "vocab_size": VOCAB,
    }
    return PairTokenizing(tokenizer(**changes), **settings)


def test_a_line_is_a_chosen_and_a_rejected_sample():
    line = {"prompt": "w0", "chosen": "w1", "rejected": "w2 w3"}
    chosen, rejected = pairs().samples(line, "line 1")
    assert chosen == ([5, 6, END], [-100, 6, END])
    assert rejected == ([5, 7, 8, END], [-100, 7, 8, END])
    whole = {"chosen": turns("w0", "w1"), "rejected": turns("w0", "w2")}
    parted = {
        "prompt": turns("w0"),
        "chosen": turns("w0", "w1")[1:],
        "rejected": turns("w0", "w2")[1:],
    }
    how = pairs(chat_template=CHAT)
    assert how.samples(whole, "line 1") == how.samples(parted, "line 1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "w0"}, "line 7: with data.objective dpo.*found text"),
        ({"chosen": "w0", "rejected": "w1"}, "line 7: chosen is a text, so prompt"),
        (
            {"prompt": "w0", "chosen": "w1", "rejected": " ".join(["w2"] * 9)},
            "line 7, rejected: the sample has 11 tokens",
        ),
    ],
)
def test_a_wrong_pair_is_named(line, words):
    with pytest.raises(ValueError, match=words):
        pairs().samples(line, "line 7")


def batch():
    ids = np.stack([tokens(), tokens()[:, ::-1]], axis=1)
    labels = ids.copy()
    labels[:, :, :4] = -100
    labels[1, 1, 9:] = -100
    reference = np.float32([[-30.0, -32.0], [-31.0, -20.0]])
    return {"input_ids": ids, "labels": labels, "reference": reference}


def torch_log_probabilities(model, ids, labels):
    with torch.no_grad():
        logits = model(torch.tensor(ids).long(), use_cache=False).logits
    wanted = torch.tensor(labels).long()[:, 1:]
    found = torch.log_softmax(logits[:, :-1], dim=-1)
    found = found.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return (found * (wanted != -100)).sum(1).numpy()


@pytest.mark.slow
def test_the_loss_is_that_of_the_paper(tmp_path):
    torch_model = save(llama(), tmp_path)
    given, beta = batch(), 0.3
    found = [
        torch_log_probabilities(
            torch_model, given["input_ids"][:, i], given["labels"][:, i]
        )
        for i in range(2)
    ]
    gains = np.stack(found, axis=1) - given["reference"]
    wanted = np.mean(np.log1p(np.exp(-beta * (gains[:, 0] - gains[:, 1]))))
    preference = hf.Preference(hf.load(tmp_path), beta)
    params = {
        n: jnp.asarray(p.numpy(force=True)) for n, p in torch_model.named_parameters()
    }
    # Sums of 8 log-probabilities near 4.6: a few units of rounding of 37.
    assert abs(float(jax.jit(preference.loss)(params, given)) - wanted) < 2e-5


def pair_file(tmp_path, count=6):
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": f"w{i}", "chosen": "w20 w21", "rejected": "w22"}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_chosen_answers_become_likelier_than_rejected_ones(adapted, tmp_path):
    folder, data = model_folder(tmp_path), pair_file(tmp_path)
    output = tmp_path / "tuned"
    common = ["--data", data, "--output", output, "--samples", 2, "--epochs", 5]
    common += ["--sequence-length", 8, "--objective", "dpo", "--beta", 0.5]
    rate = ["--lora", 4, "--learning-rate", 3e-2] if adapted else []
    rate = rate or ["--learning-rate", 1e-2]
    done = run("finetune", folder, *common, *rate)
    assert done.exit_code == 0, done.output
    assert "log-probabilities of 6 pairs, once" in done.output
    lines = (tmp_path / "tuned.run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 15
    # At first the model is the reference. In bfloat16, log-probabilities near 14 are
    # sums of terms that are off by 1/256 of the logits, here at most 0.1.
    assert abs(losses[0] - log(2)) < 0.01
    assert losses[-1] < losses[0] / 2
    tuned = transformers.AutoModelForCausalLM.from_pretrained(output).float().eval()
    begun = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    ids = np.array([[8, 25, 26, END], [8, 27, END, 2]])
    labels = np.array([[-100, 25, 26, END], [-100, 27, END, -100]])
    after, before = (torch_log_probabilities(m, ids, labels) for m in (tuned, begun))
    assert (after - before)[0] > (after - before)[1] + 1
    # The reference does not change, so a second run reads it from the file.
    again = ["--set", f"run.export={tmp_path / 'again'}", "--set", "run.steps=1"]
    again += ["--set", f"run.export_adapter={tmp_path / 'other'}"] * adapted
    config = tmp_path / "tuned.run/finetune.yaml"
    done = run("train", config, *again)
    assert done.exit_code == 0, done.output
    assert "once" not in done.output


def test_pairs_are_not_packed(tmp_path):
    folder = model_folder(tmp_path)
    files = ["--data", pair_file(tmp_path), "--output", tmp_path / "out"]
    files += ["--sequence-length", 8, "--objective", "dpo", "--packing"]
    done = run("finetune", folder, *files)
    assert done.exit_code == 2
    assert "data.packing" in done.output


@pytest.mark.slow
def test_an_engine_trains_the_loss_of_preferences(tmp_path):
    save(llama(), tmp_path)
    model = hf.load(tmp_path)
    loss = hf.Preference(model).loss
    with hf.initialize(
        model, optax.sgd(0.1), {"execution": "fused"}, loss=loss, batch=batch()
    ) as engine:
        first = engine.step(batch())["loss"]
        assert engine.step(batch())["loss"] < first
