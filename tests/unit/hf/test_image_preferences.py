"""Answers about images, compared: preferences, rewards and likelihoods."""

import json
from functools import partial

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import metrics_of, off, params_of, write

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

from tests.unit.hf.images import (  # isort: skip
    batch_of,
    config_of,
    in_torch,
    make,
    model_folder,
    picture,
    processor_folder,
    reloaded,
)
from tests.unit.hf.test_preference import (  # isort: skip
    BETA,
    GAMMA,
    REFERENCE,
    dpo,
    ipo,
    orpo,
    simpo,
    torch_log_probabilities,
)

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.core.config import Config  # isort: skip
from zinf.hf.images.model import load_head_with_images  # isort: skip
from zinf.hf.images.reader import ImageReader  # isort: skip
from zinf.hf.images.sources import opened  # isort: skip
from zinf.hf.objectives.reward import rated_losses  # isort: skip


def pairs(batch):
    """A batch of four samples as two pairs."""
    return {name: x.reshape(2, 2, *x.shape[1:]) for name, x in batch.items()}


def raw_config(folder, objective, **data):
    settings = {"objective": objective}
    if objective != "reward":
        settings["beta"] = BETA
    if objective == "simpo":
        settings["simpo_gamma"] = GAMMA
    model = {"huggingface": str(folder)}
    return {"model": model, "data": settings | {"images": 20} | data}


class TorchWith(torch.nn.Module):
    """A model of torch that is called with tokens alone, beside its images."""

    def __init__(self, model, given):
        super().__init__()
        self.model, self.given = model, given

    def forward(self, ids, use_cache):
        return self.model(**self.given | {"input_ids": ids}, use_cache=use_cache)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen2_vl", dpo), ("idefics3", ipo), ("llava", simpo), ("gemma3", orpo)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_the_loss_of_pairs_with_images_is_that_of_the_paper(name, expected, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    task = hf.Task(Config.load(raw_config(tmp_path, expected.__name__)))
    flat, images = batch_of(task.model, (1, 1, 0, 2))
    flat["labels"][:, :20] = -100
    batch = pairs(flat) | {"reference": REFERENCE.numpy()}
    batch = {n: batch[n] for n in task.batch_spec(2)}
    task.model.check(batch)
    seeing = TorchWith(torch_model, in_torch(name, flat, images))
    sums = torch_log_probabilities(seeing, flat["input_ids"], flat["labels"])
    num_tokens = torch.tensor((flat["labels"] != -100).sum(-1)).reshape(2, 2)
    mean = expected(sums.reshape(2, 2), num_tokens).mean()
    check_loss(task, torch_model, batch, mean, 2)


def check_loss(task, torch_model, batch, mean, count):
    """Compare the loss of a task, its weight and its gradients with those of torch."""
    mean.backward()

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(params, batch):
        loss = task.loss(params, batch)
        return loss.mean, loss.weight

    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    (found, counted), gradients = step(params, batch)
    # Sums of 12 log-probabilities: a few units of rounding of 60.
    assert abs(float(found) - mean.item()) < 3e-5 and counted == count
    theirs = {n: p.grad for n, p in torch_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in theirs.values() if g is not None)
    for path, gradient in gradients.items():
        wanted = theirs[path]
        wanted = np.zeros_like(gradient) if wanted is None else wanted.numpy()
        assert np.abs(gradient - wanted).max() < 2e-5 * largest, path


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_the_loss_of_labelled_answers_about_images_is_that_of_the_paper(name, tmp_path):
    torch_model = make(name)
    torch_model.save_pretrained(tmp_path)
    task = hf.Task(Config.load(raw_config(tmp_path, "kto")))
    batch, images = batch_of(task.model, (1, 0, 2))
    batch["labels"][:, :20] = -100
    seeing = TorchWith(torch_model, in_torch(name, batch, images))
    sums = torch_log_probabilities(seeing, batch["input_ids"], batch["labels"])
    gains = torch.tensor([0.5, -3.0, 2.0])
    reference, z = sums.detach() - gains, 0.7
    batch["reference"] = reference.numpy()
    batch["desirable"] = np.array([1, 0, 0], np.float32)
    batch["kl"] = np.full(3, z, np.float32)
    assert batch.keys() == task.batch_spec(3).keys()
    signs = torch.tensor([1.0, -1.0, -1.0])
    losses = 1 - torch.sigmoid(BETA * signs * (sums - reference - z))
    check_loss(task, torch_model, batch, losses.mean(), 3)


def test_scores_of_images_are_those_of_the_classifier_of_transformers(tmp_path):
    kind = transformers.AutoModelForSequenceClassification
    torch_model = make("gemma3", kind, num_labels=1, pad_token_id=2)
    torch_model.save_pretrained(tmp_path)
    model = load_head_with_images(tmp_path)
    flat, images = batch_of(model, (1, 1, 0, 2))
    given = in_torch("gemma3", flat, images)
    with torch.no_grad():
        wanted = torch_model(**given, use_cache=False).logits.reshape(2, 2)
    task = hf.Task(Config.load(raw_config(tmp_path, "reward")))
    margins = np.array([0.5, 0.0], np.float32)
    mask = np.ones_like(flat["input_ids"])
    del flat["labels"]
    batch = pairs(flat | {"attention_mask": mask}) | {"margins": margins}
    batch["labels"] = np.zeros(2, np.int32)
    assert batch.keys() == task.batch_spec(2).keys()
    params = {n: np.array(x) for n, x in params_of(torch_model).items()}
    outputs = partial(task.objective.outputs, task.model)
    scores, loss = jax.jit(lambda p, b: (outputs(p, b), task.loss(p, b).mean))(
        params, batch
    )
    assert off(scores, wanted.numpy()) < 2e-6
    losses = rated_losses(jax.numpy.asarray(wanted.numpy()), margins, 0.0)
    assert float(loss) == pytest.approx(float(losses.mean()), rel=1e-6)
    # Its embedding would be the head of a language model.
    with pytest.raises(ValueError, match="is a classifier .*, and a language model is"):
        hf.load_with_images(tmp_path)


def preferences(folder):
    """Pairs with no, one and two images, with a prompt and as whole conversations."""
    for i in range(3):
        picture(i).save(folder / f"{i}.png")

    def said(role, content):
        return {"role": role, "content": content}

    good, bad = said("assistant", "w2"), said("assistant", "w3 w4")
    parts = [{"type": "image"}, {"type": "text", "text": "w5"}, {"type": "image"}]
    own = {"type": "image", "path": "2.png"}
    shown = said("user", [own, {"type": "text", "text": "w6"}])
    lines = [
        {"prompt": [said("user", "w1")], "chosen": [good], "rejected": [bad]},
        {"prompt": [said("user", parts)], "chosen": [good], "rejected": [bad]},
        {"chosen": [said("user", "w1"), good], "rejected": [said("user", "w1"), bad]},
        {"chosen": [shown, bad], "rejected": [shown, good]},
    ]
    images = [["0.png"], ["1.png", "0.png"], None, None]
    return write(
        folder / "pairs.jsonl",
        [line | {"images": x} for line, x in zip(lines, images, strict=True)],
    )


def test_both_answers_of_a_pair_have_its_images(tmp_path):
    folder = tmp_path / "model"
    config_of("llava").save_pretrained(folder)
    processor_folder("llava", folder)
    data = preferences(tmp_path)
    raw = raw_config(
        folder, "orpo", paths=[str(data)], sequence_length=32, images=2
    ) | {"run": {"output": str(tmp_path / "run")}}
    task = hf.Task(Config.load(raw))
    rows = task.rows()
    assert len(rows) == 4
    kind = task.model.kind
    for i, count in enumerate((1, 2, 0, 1)):
        row = rows[i]
        assert [*kind.num_given(row)] == [count] * 2
        assert np.array_equal(*row["pixel_values"])
        task.model.check({n: x[None] for n, x in row.items()})
        answers = [x[x != hf.IGNORED].tolist() for x in row["labels"]]
        assert sorted(answers) == [[7, 1], [8, 9, 1]]
    # An image is kept once, though it is in two samples.
    kept = (task.samples() / "images.bin").stat().st_size
    sizes = [(tmp_path / f"{i}.png").stat().st_size for i in (0, 1, 0, 2)]
    assert kept == sum(sizes)


def labelled(folder):
    """Answers to one question about several images, which are right or not."""
    for i in range(3):
        picture(i).save(folder / f"{i}.png")
    ask = [{"role": "user", "content": "w1"}]
    lines = [
        {"prompt": ask, "completion": turns[1:], "label": label, "images": images}
        for turns, label, images in (
            (said("w2"), True, ["0.png"]),
            (said("w3 w4 w5"), False, ["0.png"]),
            (said("w6"), False, ["1.png", "2.png"]),
            (said("w7"), True, None),
        )
    ]
    return write(folder / "labelled.jsonl", lines)


def said(answer):
    return [{"role": "user", "content": "w1"}, {"role": "assistant", "content": answer}]


def test_labelled_answers_and_those_of_other_images_have_the_images(tmp_path):
    folder = tmp_path / "model"
    config_of("llava").save_pretrained(folder)
    processor_folder("llava", folder)
    data = labelled(tmp_path)
    # The sample of two images and the answer after it, of 3 tokens and an end.
    raw = raw_config(folder, "kto", paths=[str(data)], sequence_length=14, images=2)
    task = hf.Task(Config.load(raw | {"run": {"output": str(tmp_path / "run")}}))
    samples = task.rows().samples
    # The third has the answer before it, of which there is no room for the end.
    wanted = [[7, 1], [11, 1], [8, 9, 10, 1], [11, 1], [11, 1], [8, 9, 10], [12, 1]]
    wanted.append([11, 1])
    assert len(samples) == len(wanted)
    kind, model = task.model.kind, task.model
    for i, count in enumerate((1, 1, 1, 1, 2, 2, 0, 0)):
        row = {n: x[None] for n, x in samples[i].items()}
        assert [*kind.num_given(row)] == [count]
        model.check(row)
        assert row["labels"][row["labels"] != hf.IGNORED].tolist() == wanted[i]
    desirable = np.load(task.samples() / "desirable.npy")
    assert desirable.tolist() == [True, False, False, True]


def test_the_command_tells_answers_about_images_apart_on_every_tier(tmp_path):
    folder, data = model_folder("qwen2_vl", tmp_path / "model"), labelled(tmp_path)
    found = {}
    for tier in ("none", "cpu", "nvme"):
        options = ["--set", f"memory.nvme=[{tmp_path / 'drive'}]"]
        for part in ("offload_param", "offload_optimizer"):
            options += ["--set", f"zero_optimization.{part}.device={tier}"]
        run(
            *("finetune", folder, "--data", data, "--output", tmp_path / tier),
            *("--objective", "kto", "--samples", 4, "--steps", 3, *options),
            *("--learning-rate", 1e-2, "--sequence-length", 64),
            *("--set", "bf16.enabled=false", "--set", "execution=streamed"),
            *("--set", "persistence_threshold=1", "--set", "segment.remat=always"),
        )
        metrics = metrics_of(tmp_path / f"{tier}.run")
        found[tier] = [(x["loss"], x["kl"]) for x in metrics]
    assert found["none"] == found["cpu"] == found["nvme"]
    # At first the model is the reference.
    assert found["none"][0] == pytest.approx((0.5, 0), abs=1e-6)
    assert found["none"][-1][0] < 0.5


def test_the_command_prefers_and_evaluates_answers_about_images(tmp_path):
    folder, data = model_folder("qwen2_vl", tmp_path / "model"), preferences(tmp_path)
    output = tmp_path / "tuned"
    run(
        *("finetune", folder, "--data", data, "--output", output, "--objective", "dpo"),
        *("--samples", 4, "--steps", 3, "--learning-rate", 1e-2, "--eval-data", data),
        *("--sequence-length", 64, "--set", "bf16.enabled=false"),
    )
    lines = metrics_of(tmp_path / "tuned.run")
    losses = [x["loss"] for x in lines if "loss" in x]
    # The model is its own reference before the first step.
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6)
    assert losses[-1] < losses[0]
    (evaluation,) = [x["evaluation_loss"] for x in lines if "evaluation_loss" in x][-1:]
    wanted = wanted_dpo(reloaded(folder), reloaded(output), folder, data)
    assert evaluation == pytest.approx(wanted, rel=1e-5)
    shown = run("evaluate", tmp_path / "tuned.run/finetune.yaml").stdout
    assert f"loss {evaluation:.6g}," in shown


def wanted_dpo(reference, trained, folder, data, beta=0.1):
    """The mean loss of all pairs, of what `transformers` reads from the rows."""
    raw = raw_config(folder, "dpo", paths=[str(data)], sequence_length=64, images=200)
    raw["run"] = {"output": str(data.parent / "again")}
    task = hf.Task(Config.load(raw))
    processor = task.objective.tokenizing.of(
        task.model,
        sequence_length=64,
        too_long="error",
        completion_only=True,
        assistant_only=False,
    ).reader.processor
    samples, losses = task.rows().samples, []
    for pair in range(len(samples) // 2):
        gains = []
        for number in (2 * pair, 2 * pair + 1):
            ids, labels = (x[None] for x in samples.tokens(number))
            given = {"input_ids": torch.tensor(ids).long()}
            images = [opened(x, "") for x in samples._images(number)]
            if images:
                given |= processor.image_processor(images, return_tensors="pt")
                given["mm_token_type_ids"] = (
                    given["input_ids"] == task.model.image_token
                ).int()
            sums = [
                torch_log_probabilities(TorchWith(model, given), ids, labels).item()
                for model in (trained, reference)
            ]
            gains.append(sums[0] - sums[1])
        losses.append(np.logaddexp(0, -beta * (gains[0] - gains[1])))
    return np.mean(losses)


def likelihood(torch_model, processor, messages, images, num_scored):
    """The log-likelihood of the last tokens of a conversation, by `transformers`."""
    text = processor.apply_chat_template(messages)
    pictures = {"images": [images]} if images else {}
    given = dict(processor(text=[text], return_tensors="pt", **pictures))
    ids = given.pop("input_ids").numpy()
    labels = np.full_like(ids, hf.IGNORED)
    labels[:, -num_scored:] = ids[:, -num_scored:]
    with torch.no_grad():
        seeing = TorchWith(torch_model, given)
        return torch_log_probabilities(seeing, ids, labels).item()


@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3"])
def test_the_command_scores_answers_about_images(name, tmp_path):
    folder = model_folder(name, tmp_path / "model")
    images = [picture(0), picture(1, 12, 12)]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    place, text = {"type": "image"}, {"type": "text", "text": "w1"}
    contents = [[place, text], [place, text, place], [text]]
    shown = [images[:1], images, []]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "w2 w3"}]}
    talks = [[{"role": "user", "content": c}, answer] for c in contents]
    lines = [
        {"messages": t, "images": [f"{i}.png" for i in range(len(x))]}
        for t, x in zip(talks, shown, strict=True)
    ]
    asked = {"messages": talks[0][:1], "images": ["0.png"], "choices": ["w2", "w3 w4"]}
    data = write(tmp_path / "lines.jsonl", [*lines, asked])
    output = tmp_path / "scores.jsonl"
    run("score", folder, "--data", data, "--output", output)
    *found, chosen = map(json.loads, output.read_text().splitlines())
    processor = ImageReader(hf.load_with_images(folder)).processor
    rest = reloaded(folder), processor
    # The template ends an answer with </s>.
    wanted = [likelihood(*rest, t, x, 3) for t, x in zip(talks, shown, strict=True)]
    assert [x["log_likelihood"] for x in found] == pytest.approx(wanted, rel=1e-5)
    assert [x["num_tokens"] for x in found] == [3] * 3
    # A choice has no end: what follows the prompt is scored as it is.
    assert len(chosen["log_likelihoods"]) == 2 and chosen["best"] in asked["choices"]
    with pytest.raises(ValueError, match="would lose tokens"):
        hf.score(folder, lines, too_long="truncate")
