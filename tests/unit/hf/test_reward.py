"""Reward models: the losses, scores and files of TRL's `RewardTrainer`."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    TOKENS,
    TOLERANCE,
    judge,
    llama,
    make,
    metrics_of,
    on_tier,
    params_of,
    refusals,
    tokenizer,
    tokens,
    turns,
    write,
)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import optax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf, rl  # isort: skip
from zinf.core.config import Config  # isort: skip
from zinf.hf.objectives.reward import (  # isort: skip
    Rated,
    RatedTokenizing,
    rated_losses,
    scores,
)

# Made by scripts/reports/record_rl.py from TRL 1.16.0.
RECORD = np.load(Path(__file__).parents[1] / "rl/originals.npz")
COEFFICIENT = 0.01
LENGTHS = [[12, 9], [7, 12]]


def task_of(folder, **data):
    """The task of a folder whose model may have no head."""
    section = {"objective": "reward", **data}
    return hf.Task(
        Config.load({"model": {"huggingface": str(folder)}, "data": section})
    )


def batch_of():
    ids = np.stack([tokens(), tokens()[:, ::-1]], axis=1)
    mask = np.arange(TOKENS) < np.array(LENGTHS)[..., None]
    return {
        "input_ids": np.where(mask, ids, 2).astype(np.int32),
        "attention_mask": mask.astype(np.int32),
        "margins": np.float32([0.0, 0.7]),
        "labels": np.zeros(2, np.int32),
    }


def torch_scores(model, batch):
    names = ("input_ids", "attention_mask")
    given = {n: torch.tensor(batch[n]).long().flatten(0, 1) for n in names}
    return model(**given).logits.reshape(-1, 2)


def test_the_loss_is_that_of_trl():
    """On recorded scores, with and without margins and centring."""
    recorded = RECORD["pairs/logits"].reshape(2, -1).T
    for has_margin, coefficient in product((False, True), (None, 0.01)):
        margins = RECORD["pairs/margins"] * has_margin

        def loss(found, margins=margins, coefficient=coefficient):
            return rated_losses(found, margins, coefficient or 0.0).mean()

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(recorded))
        case = f"pairs/{has_margin}/{coefficient}"
        np.testing.assert_allclose(value, RECORD[f"{case}/loss"], rtol=1e-6)
        wanted = RECORD[f"{case}/grad"].reshape(2, -1).T
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-7)


def test_scores_and_gradients_are_those_of_torch(tmp_path):
    torch_model, batch = judge(tmp_path), batch_of()
    task = task_of(tmp_path, center_rewards_coefficient=COEFFICIENT)
    assert {n: x.shape for n, x in batch.items()} == {
        n: x.shape for n, x in task.batch_spec(2).items()
    } | dict.fromkeys(("input_ids", "attention_mask"), (2, 2, TOKENS))
    theirs = torch_scores(torch_model, batch)
    chosen, rejected = theirs.unbind(1)
    gains = chosen - rejected - torch.tensor(batch["margins"])
    losses = -torch.nn.functional.logsigmoid(gains)
    losses = losses + COEFFICIENT * (chosen + rejected) ** 2
    params = params_of(torch_model)
    found = scores(task.model, params, {n: jnp.asarray(x) for n, x in batch.items()})
    np.testing.assert_allclose(found, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    gradient = jax.jit(jax.value_and_grad(lambda *x: task.loss(*x).mean))
    for count in (2, 1):
        # A pair without a label, as one that fills a batch of an evaluation.
        batch["labels"][count:] = -100
        mean = losses[:count].mean()
        arrays = {name: jnp.asarray(x) for name, x in batch.items()}
        value, gradients = gradient(params, arrays)
        np.testing.assert_allclose(value, mean.item(), rtol=1e-5)
        named = dict(torch_model.named_parameters())
        wanted = torch.autograd.grad(mean, [*named.values()], retain_graph=True)
        for name, gradient_of_torch in zip(named, wanted, strict=True):
            np.testing.assert_allclose(
                gradients[name], gradient_of_torch, rtol=0, atol=2e-5, err_msg=name
            )


@pytest.mark.slow
def test_no_tier_and_no_microbatch_changes_a_loss(tmp_path):
    """To the bit between tiers, and to rounding between microbatches."""
    judge(tmp_path / "model")
    task, batch = task_of(tmp_path / "model"), batch_of()
    # Both microbatches have one pair, and one of them a pair without a label.
    batch = {n: np.concatenate([x, x[::-1]]) for n, x in batch.items()}
    batch["labels"][3] = -100

    def losses(config):
        found = []
        rest = {"loss": task.loss, "batch": batch}
        with hf.initialize(task.model, optax.adamw(1e-4), config, **rest) as engine:
            for _ in range(3):
                found.append(float(engine.step(batch)["loss"]))
        return found

    whole = {
        tier: losses(on_tier(tier, tmp_path)) for tier in ("device", "host", "nvme")
    }
    assert whole["device"] == whole["host"] == whole["nvme"]
    config = on_tier("host", tmp_path) | {"gradient_accumulation_steps": 2}
    np.testing.assert_allclose(losses(config), whole["host"], rtol=1e-5)


def tokenizing(**changes):
    settings = {
        "sequence_length": 8,
        "too_long": "error",
        "completion_only": True,
        "vocab_size": 96,
    }
    return RatedTokenizing(tokenizer(), **settings | changes)


def margin_of(sample) -> float:
    ids, labels = sample
    assert labels[:-1] == [-100] * (len(ids) - 1)
    return float(np.int32(labels[-1]).view(np.float32))


def test_a_line_becomes_whole_texts_and_a_margin():
    """With a prompt, whole texts as TRL takes them, and conversations."""
    sides = {"chosen": "w1 w2", "rejected": "w3"}
    ends = ([6, 7, 1], [8, 1])
    for before, first in (({}, []), ({"prompt": "w0"}, [5])):
        reading = tokenizing().read({**before, **sides, "margin": -1.5}, "line 1")
        assert [ids for ids, _ in reading.samples] == [[*first, *x] for x in ends]
        assert [margin_of(sample) for sample in reading.samples] == [-1.5, -1.5]
    # A template that says nothing of answers, which other objectives of pairs refuse.
    plain = tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with_template = RatedTokenizing(plain, 8, "error", True, 96)
    line = {"chosen": turns("w0", "w1"), "rejected": turns("w0", "w2")}
    reading = with_template.read(line, "line 1")
    assert [ids for ids, _ in reading.samples] == [[5, 6], [5, 7]]
    assert margin_of(reading.samples[0]) == 0


def test_bad_lines_are_refused_by_name(tmp_path, golden):
    line = {"prompt": "w0", "chosen": "w1", "rejected": "w2"}
    mistakes = {
        f"a margin of {margin!r}": lambda margin=margin: tokenizing().read(
            line | {"margin": margin}, "line 1"
        )
        for margin in ("large", True, float("nan"), float("inf"))
    }
    mistakes["a line without a rejected answer"] = lambda: tokenizing().read(
        {"chosen": "w1", "text": "w1"}, "line 1"
    )
    mistakes["a chosen answer that is no text"] = lambda: tokenizing().read(
        line | {"chosen": 3}, "line 1"
    )
    mistakes["a long answer"] = lambda: tokenizing().read(
        line | {"chosen": "w1 " * 9}, "line 1"
    )
    golden.check("reward.txt", refusals(mistakes, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_the_command_trains_a_judge_that_transformers_opens(adapted, tmp_path):
    """Answers with w1 are better; held-out pairs are told apart."""
    make(llama()).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(36):
        words = [f"w{n}" for n in rng.integers(4, 30, 3)]
        chosen, rejected = ([*words, "w1"], [*words, "w2"])
        rng.shuffle(chosen), rng.shuffle(rejected)
        line = {"chosen": " ".join(chosen), "rejected": " ".join(rejected)}
        lines.append({"prompt": "w0", **line, "margin": 0.1})
    data = write(tmp_path / "pairs.jsonl", lines[:32])
    held_out = write(tmp_path / "held_out.jsonl", lines[32:])
    output = tmp_path / "judge"
    rate = ["--lora", 4, "--learning-rate", 3e-2] if adapted else []
    run(
        *("finetune", tmp_path / "model", "--objective", "reward", "--data", data),
        *("--eval-data", held_out, "--output", output, "--samples", 8, "--epochs", 6),
        *("--sequence-length", 8, "--center-rewards-coefficient", 0.01),
        *(rate or ("--learning-rate", 1e-2)),
    )
    metrics = metrics_of(tmp_path / "judge.run")
    # At first scores differ little, so a loss is near log 2.
    assert abs(metrics[0]["loss"] - np.log(2)) < 0.2
    assert metrics[-1]["evaluation_accuracy"] == 1
    assert metrics[-1]["evaluation_margin"] > 1
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(output).float().eval()
    assert model.config.num_labels == 1
    opened = transformers.AutoTokenizer.from_pretrained(output)
    found = []
    for line in lines[32:]:
        for side in ("chosen", "rejected"):
            ids = opened(f"w0 {line[side]}").input_ids + [opened.eos_token_id]
            found.append(float(model(torch.tensor([ids])).logits[0, 0].detach()))
    margins = np.subtract(found[::2], found[1::2])
    told = run("evaluate", output, "--data", held_out).stdout
    assert "accuracy 1, margin " in told and "4 pairs" in told
    margin = float(told.split("margin ")[1].split(",")[0])
    np.testing.assert_allclose(margin, margins.mean(), rtol=1e-3)
    of_run = run("evaluate", tmp_path / "judge.run/finetune.yaml").stdout
    assert "accuracy 1, margin" in of_run and "mean reward" in of_run
    # Scores of the run are in bfloat16.
    np.testing.assert_allclose(
        margins.mean(), metrics[-1]["evaluation_margin"], rtol=0.05
    )
    # It goes on as a reward model, with the head that it has.
    files, weights = task_of(output).model.open_weights()
    with files:
        assert not weights.new


def experience(folder):
    """A critic that begins as a reward model, and a batch for it."""
    torch_model, batch = judge(folder), batch_of()
    mask = np.float32(batch["attention_mask"][:, 0, 1:])
    mask[:, :3] = 0
    weights, denominators = rl.token_weights(mask, "dapo")
    rng = np.random.default_rng(0)
    old, returns = np.float32(rng.normal(size=(2, *mask.shape)))
    return torch_model, {
        "input_ids": batch["input_ids"][:, 0],
        "weights": weights,
        "denominators": denominators,
        "old_values": old,
        "returns": returns,
    }


def test_a_critic_has_the_values_and_the_loss_of_deepspeed_chat(tmp_path):
    """Those of the reward model's head before each token, and `critic_loss_fn`."""
    torch_model, batch = experience(tmp_path)
    ids = torch.tensor(batch["input_ids"]).long()
    hidden = torch_model.model(ids).last_hidden_state
    values = torch_model.score(hidden)[:, :-1, 0]
    critic = hf.Critic(hf.load_critic(tmp_path))
    assert not critic.model.is_random
    params = params_of(torch_model) | {"score.bias": jnp.zeros(1)}
    arrays = {name: jnp.asarray(x) for name, x in batch.items()}
    found = critic.values(params, arrays)
    np.testing.assert_allclose(found, values.detach(), rtol=1e-5, atol=1e-5)
    old, returns = (torch.tensor(batch[n]) for n in ("old_values", "returns"))
    mask = torch.tensor(batch["weights"])
    clipped = torch.clamp(values, old - 0.2, old + 0.2)
    errors = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    wanted = 0.5 * torch.sum(errors * mask) / mask.sum()
    wanted.backward()
    gradient = jax.jit(jax.value_and_grad(lambda *x: critic.loss(*x).mean))
    loss, gradients = gradient(params, arrays)
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-5)
    for name, parameter in torch_model.named_parameters():
        np.testing.assert_allclose(
            gradients[name], parameter.grad, rtol=0, atol=2e-5, err_msg=name
        )


@pytest.mark.slow
def test_a_critic_trains_away_from_the_device(tmp_path):
    """It begins with the head of the reward model, and a bias of 0."""
    _, batch = experience(tmp_path / "model")
    critic = hf.Critic(hf.load_critic(tmp_path / "model"), rl.ValueLoss(None))
    files, weights = critic.model.open_weights()
    with files:
        assert weights.new == ("score.bias",)
        assert weights.whole("score.bias") == 0
    rest = {"loss": critic.loss, "batch": batch}
    config = on_tier("host", tmp_path)
    with hf.initialize(critic.model, optax.adamw(1e-2), config, **rest) as engine:
        before = engine.apply(critic.values, batch)
        losses = [float(engine.step(batch)["loss"]) for _ in range(6)]
    assert before.shape == batch["returns"].shape
    errors = np.square(before - batch["returns"])[batch["weights"] != 0]
    np.testing.assert_allclose(losses[0], errors.mean() / 2, rtol=1e-5)
    assert losses[-1] < losses[0] / 2


def test_rows_have_masks_and_margins(tmp_path):
    judge(tmp_path)
    lines = [{"chosen": "w1 w2", "rejected": "w3", "margin": m} for m in (0.5, None)]
    raw = {"model": {"huggingface": str(tmp_path)}, "run": {"output": str(tmp_path)}}
    paths = [str(write(tmp_path / "pairs.jsonl", lines))]
    raw["data"] = {"objective": "reward", "paths": paths, "sequence_length": 5}
    rows = hf.Task(Config.load(raw)).rows()
    assert isinstance(rows, Rated)
    assert rows[0]["input_ids"].tolist() == [[6, 7, 1, 2, 2], [8, 1, 2, 2, 2]]
    assert rows[0]["attention_mask"].sum(1).tolist() == [3, 2]
    assert [row["margins"] for row in (rows[0], rows[1])] == [0.5, 0]
