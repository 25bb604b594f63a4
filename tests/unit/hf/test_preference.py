"""Answers that were chosen against rejected ones."""

import os
import re
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

import numpy as np
import pytest

from tests.command import run
from tests.unit.config.cases import OF_SOME
from tests.unit.hf.models import (
    CHAT,
    END,
    llama,
    metrics_of,
    model_folder,
    params_of,
    save,
    tokenizer,
    tokens,
    write,
)

import jax  # isort: skip
import torch  # isort: skip
from safetensors.torch import load_file, save_file  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.config import Config  # isort: skip
from zinf.core.objectives import FINETUNED, OBJECTIVES  # isort: skip
from zinf.hf.dataset import tokenizing_of  # isort: skip
from zinf.hf.objectives.dpo import reference_file  # isort: skip

# Keys of data by which files are found, opened and divided, or models are made.
BY_FILES = {"cache", "evaluation_paths", "images", "labels", "max_buckets"}
BY_FILES |= {"validation_fraction"}


def torch_log_probabilities(model, ids, labels):
    logits = model(torch.tensor(ids).long(), use_cache=False).logits
    wanted = torch.tensor(labels).long()[:, 1:]
    found = torch.log_softmax(logits[:, :-1], dim=-1)
    found = found.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
    return (found * (wanted != -100)).sum(1)


BETA, GAMMA = 0.3, 0.8
REFERENCE = torch.tensor([[-30.0, -32.0], [-31.0, -20.0]])


def dpo(sums, num_tokens):
    """Equation 7 of the paper."""
    chosen, rejected = (sums - REFERENCE).unbind(1)
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))


def ipo(sums, num_tokens):
    """As `DPOTrainer` of TRL with loss_type ipo."""
    chosen, rejected = (sums / num_tokens).unbind(1)
    reference_chosen, reference_rejected = (REFERENCE / num_tokens).unbind(1)
    logits = (chosen - rejected) - (reference_chosen - reference_rejected)
    return (logits - 1 / (2 * BETA)) ** 2


def simpo(sums, num_tokens):
    """As `CPOTrainer` of TRL with loss_type simpo and cpo_alpha 0."""
    chosen, rejected = (sums / num_tokens).unbind(1)
    logits = chosen - rejected - GAMMA / BETA
    return -torch.nn.functional.logsigmoid(BETA * logits)


def orpo(sums, num_tokens):
    """As `ORPOTrainer` of TRL, with the answer alone in the first term."""
    chosen, rejected = (sums / num_tokens).unbind(1)
    log_odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return -chosen - BETA * torch.nn.functional.logsigmoid(log_odds)


@pytest.mark.parametrize("expected", [dpo, ipo, simpo, orpo], ids=lambda x: x.__name__)
def test_the_loss_is_that_of_the_paper(expected, tmp_path):
    torch_model = save(llama(), tmp_path)
    data: dict[str, Any] = {"objective": expected.__name__, "beta": BETA}
    if expected is simpo:
        data["simpo_gamma"] = GAMMA
    raw = {"model": {"huggingface": str(tmp_path)}, "data": data}
    task = hf.Task(Config.load(raw))
    ids = np.stack([tokens(), tokens()[:, ::-1]], axis=1)
    labels = ids.copy()
    labels[:, :, :4] = -100
    labels[1, 1, 9:] = -100
    batch = {"input_ids": ids, "labels": labels, "reference": REFERENCE.numpy()}
    batch = {name: batch[name] for name in task.batch_spec(2)}
    sides = [
        torch_log_probabilities(torch_model, ids[:, i], labels[:, i]) for i in (0, 1)
    ]
    num_tokens = torch.tensor((labels != -100).sum(-1))
    losses = expected(torch.stack(sides, dim=1), num_tokens)
    named = dict(torch_model.named_parameters())

    def compare(mean, weight):
        (found, counted), gradients = step(params_of(torch_model), batch)
        # Sums of 8 log-probabilities near 4.6: a few units of rounding of 37.
        assert abs(float(found) - mean.item()) < 2e-5 and counted == weight
        wanted = torch.autograd.grad(mean, [*named.values()], retain_graph=True)
        for name, gradient in zip(named, wanted, strict=True):
            np.testing.assert_allclose(
                gradients[name], gradient, rtol=0, atol=1e-5, err_msg=name
            )

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(params, batch):
        loss = task.loss(params, batch)
        return loss.mean, loss.weight

    compare(losses.mean(), 2)
    # A pair without a label, as one that fills a batch of an evaluation, has no weight.
    labels[0] = -100
    compare(losses[1], 1)


@pytest.mark.parametrize("objective", FINETUNED)
def test_rows_of_each_objective_are_those_that_it_plans_for(objective, tmp_path):
    folder = model_folder(tmp_path)
    line = {"text": "w0 w1 w2", "label": 1}
    if OBJECTIVES[objective].num_sequences == 2:
        line = {"prompt": "w0", "chosen": "w1 w2", "rejected": "w3"}
    lines = [line] * 3
    if objective == "kto":
        lines = [
            {"prompt": f"w{i}", "completion": "w1 w2", "label": True} for i in range(3)
        ]
    data: dict[str, Any] = {"objective": objective, "sequence_length": 8}
    data["paths"] = [str(write(tmp_path / "lines.jsonl", lines))]
    if "labels" in OBJECTIVES[objective].reads:
        data["labels"] = ["no", "yes"]
    raw = {"model": {"huggingface": str(folder)}, "data": data}
    raw["run"] = {"output": str(tmp_path / "out")}
    task = hf.Task(Config.load(raw))
    rows = task.rows()
    asks = task.objective.asks
    if "reference" in task.batch_spec(3):
        samples = task.samples()
        np.save(
            reference_file(samples, task.model, task.config), np.zeros((3, 2), "f4")
        )
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    if asks is not None:
        zeros = np.zeros((3, 2), np.float32)
        given = task.model, lambda function: function, task.config
        batch = asks(lambda *_, **__: zeros, *given)(batch)
    row = {name: (x.shape[1:], x.dtype) for name, x in batch.items()}
    spec = {name: (x.shape[1:], x.dtype) for name, x in task.batch_spec(3).items()}
    assert row == spec


class Told:
    """A model whose log-probabilities and logits are those of no weights."""

    image_leaves, scored_leaves = (), ("input_ids", "labels")

    def loss(self, *_, **__):
        return 0.0

    def log_probabilities(self, params, batch, **_):
        return -(jax.numpy.arange(1.0, 1 + len(batch["labels"])) ** 2)

    def logits(self, params, batch, **_):
        return jax.numpy.arange(1.0, 1 + len(batch["input_ids"]))[:, None]


def outcome(config):
    """What comes of a config: samples of lines, shapes of a batch, and its loss."""
    task, found = hf.Task(config), []
    spec = task.objective.batch_spec(config, 2, 4)
    how = tokenizing_of(task.model, config, task.objective.tokenizing)
    without_tags = re.sub("{% (end)?generation %}", "", CHAT)
    how = replace(how, tokenizer=tokenizer(chat_template=without_tags))
    sides = {"completion": "w1", "other_completion": "w2", "chosen": "w1"}
    sides["rejected"] = "w3"
    said = {n: [{"role": "assistant", "content": x}] for n, x in sides.items()}
    long = "w4 w5 w6 w7 w8 w9"
    lines = [{"prompt": prompt, "label": True} | sides for prompt in ("w4", long)]
    lines.append({"prompt": [{"role": "user", "content": "w0"}], "label": True} | said)
    lines += [{"text": text, "label": 1} for text in ("w4", long)]
    for line in lines:
        try:
            found.append(how.read(line, "a line"))
        except ValueError as error:
            found.append(str(error))
    loss = task.objective.loss(Told(), config)
    batch = {
        n: (np.arange(np.prod(x.shape)) % 2).reshape(x.shape).astype(x.dtype)
        for n, x in spec.items()
    }
    return str([found, spec, loss(None, batch)])


@pytest.mark.parametrize("objective", FINETUNED)
def test_an_objective_reads_the_keys_that_it_names_and_no_others(objective, tmp_path):
    data: dict[str, Any] = {"objective": objective, "sequence_length": 5}
    if objective == "classification":
        data["labels"] = ["no", "yes"]
    folder = str(model_folder(tmp_path))
    usual = Config.load({"model": {"huggingface": folder}, "data": data})
    read = set()
    for key in OF_SOME.keys() - BY_FILES:
        changed = usual.data.model_copy(update={key: OF_SOME[key]})
        if outcome(usual.model_copy(update={"data": changed})) != outcome(usual):
            read.add(key)
    assert read == OBJECTIVES[objective].reads - BY_FILES


def tuned(objective, folder, *options):
    """What `zinf finetune` says of six pairs, and its losses."""
    chosen, rejected = "w20 w21", "w22"
    lines = [
        {"prompt": f"w{i}", "chosen": chosen, "rejected": rejected} for i in range(6)
    ]
    named = ["--data", write(folder / "pairs.jsonl", lines), "--objective", objective]
    named += ["--output", folder / "tuned", "--sequence-length", 8, "--samples", 2]
    done = run("finetune", model_folder(folder), *named, *options)
    return done.output, losses_in(folder)


def losses_in(folder):
    return [line["loss"] for line in metrics_of(folder / "tuned.run")]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_chosen_answers_become_likelier_than_rejected_ones(adapted, tmp_path):
    folder, output = tmp_path / "model", tmp_path / "tuned"
    common = ["--epochs", 5, "--beta", 0.5, "--lr-scheduler-type", "constant"]
    rate = ["--lora", 4, "--learning-rate", 3e-2] if adapted else []
    rate = rate or ["--learning-rate", 1e-2]
    said, losses = tuned("dpo", tmp_path, *common, *rate)
    assert "log-probabilities of 6 pairs, once" in said
    assert len(losses) == 15
    # At first the model is the reference. In bfloat16, log-probabilities near 14 are
    # sums of terms that are off by 1/256 of the logits, here at most 0.1.
    assert abs(losses[0] - log(2)) < 0.01
    assert losses[-1] < losses[0] / 2
    kind = transformers.AutoModelForCausalLM
    models = [kind.from_pretrained(x).float().eval() for x in (output, folder)]
    ids = np.array([[8, 25, 26, END], [8, 27, END, 2]])
    labels = np.array([[-100, 25, 26, END], [-100, 27, END, -100]])
    after, before = (torch_log_probabilities(m, ids, labels) for m in models)
    assert (after - before)[0] > (after - before)[1] + 1
    if adapted:
        return

    def again(name):
        settings = f"run.export={tmp_path / name}", "run.steps=1"
        given = [part for setting in settings for part in ("--set", setting)]
        return run("train", tmp_path / "tuned.run/finetune.yaml", *given).output

    # The reference does not change, so a second run reads it from the file.
    assert "once" not in again("second")
    # Other weights of the same size and time have their own reference.
    for path in folder.glob("*.safetensors"):
        before = path.stat()
        tensors = {n: 2 * x for n, x in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
    assert "log-probabilities of 6 pairs, once" in again("third")
    assert abs(losses_in(tmp_path)[0] - log(2)) < 0.01
    # A file of another model that a digest did not tell from this one is found too.
    for path in (tmp_path / "tuned.run/data").glob("samples-*/reference-*.npy"):
        np.save(path, np.load(path) - [[0.0, 1.0]])
    assert "is of another model than this one" in again("fourth")
    assert abs(losses_in(tmp_path)[0] - log(2)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ipo", "simpo", "orpo"])
def test_losses_of_means_fall_with_the_reference_that_they_need(objective, tmp_path):
    rate = "--learning-rate", 1e-2
    _, losses = tuned(objective, tmp_path, "--epochs", 4, "--beta", 2.0, *rate)
    found = [*tmp_path.glob("tuned.run/data/**/reference-*")]
    assert len(found) == (objective == "ipo")
    if objective == "ipo":
        # At first gains are 0, but for rounding, and the target is 1 / (2 * beta).
        assert abs(losses[0] - 0.25**2) < 0.01
    assert losses[-1] < losses[0] / 2
