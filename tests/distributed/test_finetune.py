"""`zinf finetune`, `grpo` and `ppo` in several processes tune a model as one does."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.processes import Ended, free_port, run_all
from tests.unit.hf.models import data_file, judge, metrics_of, model_folder, write
from zinf.cli import USER_ERROR
from zinf.distributed.group import ENDED_BY_ANOTHER

from safetensors.numpy import load_file  # isort: skip
from tests.unit.hf import images  # isort: skip

pytestmark = pytest.mark.slow
# Sums over devices are taken in another order than on one, through three steps of Adam.
RELATIVE = 1e-5


def finetune(
    folder, data, output, *more, deeds, command="finetune", steps=3
) -> list[Ended]:
    """A command in as many processes, of two devices each, as there are deeds."""
    options = ["--data", data, "--output", output, "--steps", steps]
    options += ["--learning-rate", 1e-2]
    options += ["--set", "persistence_threshold=1", "--set", "bf16.enabled=false"]
    count, at = len(deeds), f"--coordinator=127.0.0.1:{free_port()}"
    lines = []
    for index, deed in enumerate(deeds):
        line = [deed, 0, command, folder, *options, *more]
        if count > 1:
            line += [at, f"--num-processes={count}", f"--process-id={index}"]
        lines.append([str(part) for part in line])
    return run_all("command", lines)


PAIRS = [
    {"prompt": f"w{i}", "chosen": f"w{i} w2", "rejected": f"w{i} w3"} for i in range(24)
]


def chats_with_images(folder: Path) -> Path:
    """Records with one or two images of different sizes."""
    lines = []
    for i in range(24):
        images.picture(i, 12 + 8 * (i % 2), 20).save(folder / f"{i}.png")
        ask = {"role": "user", "content": f"w{i}"}
        answer = {"role": "assistant", "content": f"w{i + 1} w{i + 2}"}
        names = [f"{i}.png", f"{i // 2}.png"][: 1 + i % 2]
        lines.append({"messages": [ask, answer], "images": names})
    return write(folder / "chats.jsonl", lines)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("sft", (1, 2, 4)),
        ("lora", (1, 2)),
        ("seq", (1, 2)),
        ("dpo", (1, 2)),
        ("reward", (1, 2)),
        ("images", (1, 2)),
    ],
)
def test_processes_tune_and_export_as_one(name, counts, tmp_path):
    folder = model_folder(tmp_path)
    if name == "images":
        folder = images.model_folder("qwen2_vl", tmp_path / "seeing")
        data, more = chats_with_images(tmp_path), ["--sequence-length", 64]
    elif name in ("sft", "lora", "seq"):
        data, more = data_file(tmp_path, count=24), []
    else:
        data, more = write(tmp_path / "pairs.jsonl", PAIRS), ["--objective", name]
    if name in ("lora", "dpo"):
        more += ["--lora", 4]
    if name == "reward":
        more += ["--eval-data", data, "--set", "run.evaluate_every=3"]
    losses, weights = [], []
    for count in counts:
        output = tmp_path / f"tuned{count}"
        # Along tensor devices of one process, or of all.
        parts = {"sft": 2, "lora": 2 * count, "seq": 2 * count}.get(name, 1)
        axis = "seq" if name == "seq" else "tensor"
        rest = [*more, "--set", f"mesh.{axis}={parts}"]
        ended = finetune(folder, data, output, *rest, deeds=["nothing"] * count)
        for process in ended:
            assert process.code == 0, process.output
        assert f"The tuned model is in {output}" in ended[0].output
        assert not any("tuned model" in process.output for process in ended[1:])
        (file,) = output.glob("*.safetensors")
        weights.append(load_file(file))
        metrics = metrics_of(tmp_path / f"tuned{count}.run")
        measured = ("loss", "evaluation_loss", "evaluation_margin")
        losses.append([x[key] for x in metrics for key in measured if key in x])
    assert len(losses[0]) == 3 + 2 * (name == "reward")
    for own_losses, own in zip(losses[1:], weights[1:], strict=True):
        np.testing.assert_allclose(own_losses, losses[0], rtol=RELATIVE)
        for name, weight in weights[0].items():
            # A gradient near zero may have another sign, and Adam's first steps go by
            # it.
            differing = np.abs(own[name] - weight) > 1e-3 * np.abs(weight).max()
            assert differing.mean() < 1e-2, name


def test_processes_with_other_weights_do_not_train_a_mixture(tmp_path):
    given = model_folder(tmp_path), data_file(tmp_path, count=24), tmp_path / "tuned"
    ended = finetune(*given, deeds=("nothing", "misread"))
    for process in ended:
        # Each finds it, and may hear of the other first.
        assert process.code in (USER_ERROR, ENDED_BY_ANOTHER), process.output
        assert "The processes do not begin alike: " in process.output


REWARDS = """
def evens(completions, completion_ids, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def reply(prompts, completions, turns, seeds):
    return [None if t > 1 else f"w{s % 7}" for t, s in zip(turns, seeds)]
"""


def seeing(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A model that reads images, and prompts with none, one and two of them."""
    for i in range(3):
        images.picture(i, 12 + 8 * i, 20).save(folder / f"{i}.png")
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"w{i}"}],
            "images": [f"{i % 3}.png", "0.png"][: i % 3] or None,
        }
        for i in range(8)
    ]
    return images.model_folder("qwen2_vl", folder / "seeing"), prompts


FROM_REWARDS = ("loss", "reward", "entropy", "completions/mean_length", "kl")


@pytest.mark.parametrize("name", ["grpo", "ppo", "images"])
def test_two_processes_learn_from_rewards_and_go_on_as_one(name, tmp_path):
    """Also when they go on within a rollout, and the one did not stop."""
    folder, command = model_folder(tmp_path), "ppo" if name == "ppo" else "grpo"
    prompts = [{"prompt": f"w{i} w{i + 1}" * (1 + i % 2)} for i in range(8)]
    if name == "images":
        folder, prompts = seeing(tmp_path)
    data, file = write(tmp_path / "prompts.jsonl", prompts), tmp_path / "rewards.py"
    file.write_text(REWARDS)
    (images.judge if name == "images" else judge)(tmp_path / "judge")
    more = ["--samples", 8, "--reward", f"{file}:evens", "--set", "scheduler=null"]
    more += ["--reward", tmp_path / "judge", "--set", "gradient_accumulation_steps=2"]
    if command == "grpo":
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5, 9]}')
        more += ["--num_generations", 4, "--max_completion_length", 12]
        more += ["--beta", 0.1, "--num_iterations", 2]
        if name == "grpo":
            more += ["--environment", f"{file}:reply"]
    else:
        more += ["--response_length", 6, "--num_ppo_epochs", 2]
    found, texts = [], []
    stops = (2,) if name == "images" else (3, 5)
    for count in (1, 2):
        output, run = tmp_path / f"tuned{count}", tmp_path / f"tuned{count}.run"
        for steps in stops if count == 2 else stops[-1:]:
            rest = [*more, *["--resume"] * run.exists()]
            given = {"deeds": ["nothing"] * count, "command": command, "steps": steps}
            ended = finetune(folder, data, output, *rest, **given)
            for process in ended:
                assert process.code == 0, process.output
            shutil.rmtree(output)
        found.append([[m.get(n, 0.0) for n in FROM_REWARDS] for m in metrics_of(run)])
        lines = map(json.loads, (run / "completions.jsonl").read_text().splitlines())
        texts.append([[x["step"], x["completion"]] for x in lines])
    assert texts[1] == texts[0] and len(found[0]) == stops[-1]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)
