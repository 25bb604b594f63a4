"""Objective kto: answers that are desirable or not, each by itself."""

from pathlib import Path

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import metrics_of, model_folder, reloaded, write

import jax  # isort: skip
import torch  # isort: skip

from zinf.core.config import Config  # isort: skip
from zinf.hf.objectives.kto import LabelledTokenizing, kto_losses  # isort: skip
from zinf.hf.records import records  # isort: skip

# Of TRL 1.16.0, by scripts/reports/record_kto.py.
RECORDED = np.load(Path(__file__).parent / "kto.npz")
FP32 = ("--set=bf16.enabled=false",)
CASES = sorted({name.partition("/")[0] for name in RECORDED if "/" in name})


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_trl(case):
    desirable, undesirable, beta, sign = RECORDED[f"{case}/settings"].tolist()
    data = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    config = Config.load({"data": {"objective": "kto", "beta": beta, **data}})
    kl = np.maximum(0, sign * RECORDED["divergences"].mean())
    np.testing.assert_allclose(kl, RECORDED[f"{case}/kl"], rtol=1e-6)
    labels = RECORDED["label"].astype(np.float32)

    @jax.value_and_grad
    def loss(logps):
        gains = logps - RECORDED["ref_logps"]
        return kto_losses(gains, kl, labels, config).mean()

    found, grad = loss(RECORDED["logps"])
    np.testing.assert_allclose(found, RECORDED[f"{case}/loss"], atol=1e-6)
    np.testing.assert_allclose(grad, RECORDED[f"{case}/grad"], atol=1e-6)


def line(prompt, completion, label=True):
    return {"prompt": prompt, "completion": completion, "label": label}


def test_each_prompt_has_the_completion_of_another_one(tmp_path):
    lines = [line(*pair) for pair in ("aA", "aB", "bC", "bD", "cE", "aF")]
    path = write(tmp_path / "lines.jsonl", lines)
    found = [x["other_completion"] for x, *_ in LabelledTokenizing.records(path)]
    # The first two have that of the first line of another prompt; no one has its own.
    assert found == ["C", "C", "B", "B", "D", "E"]
    assert len([*records(path)]) == len(lines)


MISTAKES = {
    "must have prompt, completion and label, .*found prompt, completion": [
        {"prompt": "w1", "completion": " w2"}
    ],
    "label, which is true or false": [{**line("w1", " w2"), "label": "yes"}],
    "all lines of the file have this prompt": [line("w1", " w2"), line("w1", " w3")],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_line_that_kto_cannot_use_is_named(message, tmp_path):
    data = write(tmp_path / "lines.jsonl", MISTAKES[message])
    given = ["--data", data, "--objective", "kto", "--output", tmp_path / "out"]
    done = run("finetune", model_folder(tmp_path), *given, code=2)
    assert "line 1" in done.output
    assert all(part in done.output for part in message.split(".*"))


def tuned(folder, name, *options):
    lines = [line(f"w{i}", " w20 w21", label=True) for i in range(8)]
    lines += [line(f"w{i}", " w22", label=False) for i in range(8)]
    data = write(folder / "lines.jsonl", lines)
    given = ["--data", data, "--objective", "kto", "--output", folder / name]
    given += ["--sequence-length", 8, "--samples", 4, "--learning-rate", 1e-2, *FP32]
    given += ["--lr-scheduler-type", "constant", "--beta", 0.5]
    done = run("finetune", model_folder(folder), *given, *options)
    return done.output, metrics_of(folder / f"{name}.run")


@pytest.mark.slow
def test_desirable_answers_become_likelier_and_others_do_not(tmp_path):
    evaluates = "--set=run.evaluate_every=8", "--set=data.validation_fraction=0.1"
    said, metrics = tuned(tmp_path, "tuned", "--steps", 24, *evaluates)
    assert "log-probabilities of 16 pairs, once" in said
    # Of 2 rows, and 2 that fill the batch and have no weight.
    evaluations = [m["evaluation_loss"] for m in metrics if "evaluation_loss" in m]
    assert len(evaluations) == 3 and evaluations[-1] < 0.5
    shown = run("evaluate", tmp_path / "tuned.run/finetune.yaml").stdout
    assert f"loss {evaluations[-1]:.6g}, " in shown
    # At first the model is the reference: z is 0 and each loss a half.
    assert metrics[0]["kl"] < 1e-6 and abs(metrics[0]["loss"] - 0.5) < 1e-6
    assert metrics[-1]["loss"] < 0.25
    assert max(m["kl"] for m in metrics) > 0
    models = [reloaded(x).float() for x in (tmp_path / "tuned", tmp_path / "model")]
    ids = torch.tensor([[8, 25, 26], [8, 27, 2]])
    with torch.no_grad():
        after, before = (m(ids).logits.log_softmax(-1)[:, 0] for m in models)
    gains = after - before
    assert gains[0, 25] > gains[1, 27] + 1


@pytest.mark.slow
def test_evaluations_take_z_from_the_weights_that_are_evaluated(tmp_path):
    """In the run as in `zinf evaluate`, which reads the averages of the checkpoint."""
    options = ["run.evaluate_every=6", "data.validation_fraction=0.5"]
    options += ["optimizer.ema=0.7", "run.weights=ema"]
    sets = [f"--set={option}" for option in options]
    _, metrics = tuned(tmp_path, "tuned", "--steps", 6, *sets)
    (found,) = [m["evaluation_loss"] for m in metrics if "evaluation_loss" in m]
    path = tmp_path / "tuned.run/finetune.yaml"
    shown = run("evaluate", path).stdout, run("evaluate", path, "--weights=master")
    assert f"loss {found:.6g}, " in shown[0]
    assert f"loss {found:.6g}, " not in shown[1].stdout


@pytest.mark.slow
def test_losses_and_z_do_not_depend_on_microbatches_and_tiers(tmp_path):
    """A run that goes on has those of one in a piece."""
    nvme = [f"--set=memory.nvme=[{tmp_path / 'drive'}]", "--set=execution=streamed"]
    nvme += ["--set=zero_optimization.stage=3", "--set=persistence_threshold=1"]
    for part in ("offload_param", "offload_optimizer"):
        nvme.append(f"--set=zero_optimization.{part}.device=nvme")
    ways = {
        "one": [],
        "two": ["--set=gradient_accumulation_steps=2"],
        "nvme": nvme,
    }
    found = {}
    for name, options in ways.items():
        _, metrics = tuned(tmp_path, name, "--steps", 4, *options)
        found[name] = np.array([[m["loss"], m["kl"]] for m in metrics])
    assert (found["one"][1:, 1] > 0).any()
    for name in ("two", "nvme"):
        np.testing.assert_allclose(found[name], found["one"], rtol=1e-4, atol=1e-5)
