"""A config names a teacher: `zinf train` asks it, `zinf plan` counts what it holds."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from tests.command import run
from zinf.cli.teacher import HELD_LOGITS, KEY, plan_teacher
from zinf.core.config import Config, ConfigError
from zinf.core.machine.devices import on_devices
from zinf.core.plan import InfeasibleError
from zinf.core.program import Tier

TIERS = {
    "device": ({}, {}),
    "nvme": ({"device": "nvme"}, {"device": "nvme"}),
}
ROWS, LENGTH, VOCAB = 4, 16, 256


def config(folder, name, **changed) -> dict[str, Any]:
    """A model that trains in a second."""
    path = folder / "text.txt"
    if not path.exists():
        letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
        path.write_bytes(letters.tobytes())
    model = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_length": LENGTH}
    return {
        "model": model | changed.pop("model", {}),
        "data": {"paths": [str(path)], "sequence_length": LENGTH},
        "train_batch_size": ROWS,
        "execution": "streamed",
        "segment": {"remat": "always"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        # The same folder for both.
        "memory": {"nvme": [str(folder / "drive")]},
        "persistence_threshold": 1,
        "run": {"steps": 3, "output": str(folder / name), "log_every": 1},
        **changed,
    }


def write(folder, name, **changed):
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config(folder, name, **changed)))
    return path


def taught(folder, name="student", teacher=None, **changed):
    """The config file of a student."""
    section = {"teacher": str(folder / "teacher.yaml"), **(teacher or {})}
    return write(folder, name, distillation=section, **changed)


def planned(path, overrides=()):
    return plan_teacher(*on_devices(path, overrides=overrides))


def lines(folder, name):
    text = (folder / name / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_what_a_teacher_cannot_be_with_is_refused(tmp_path):
    section = {"distillation": {"teacher": "teacher.yaml"}}
    own = {"model": config(tmp_path, "student")["model"]}
    curriculum = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    }
    for name, others in {
        "adapter": {**own, "adapter": {"r": 2}},
        "curriculum_learning": {**own, "curriculum_learning": curriculum},
    }.items():
        with pytest.raises(ConfigError, match=f"distillation.*not.* with {name} yet"):
            Config.load({**section, **others})


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"model": {"vocab_size": 300}}, "vocab_size is 300, and that.*256"),
        ({"model": {"max_length": 8}}, "max_length is 8 tokens.*this config 16"),
        ({"adapter": {"r": 2}}, "config has adapter, which is not supported"),
        ({"model": {"huggingface": "folder"}}, "config has model.huggingface, which"),
    ],
)
def test_a_teacher_that_does_not_fit_the_student_is_refused(teacher, message, tmp_path):
    path = tmp_path / "teacher.yaml"
    raw = config(tmp_path, "teacher") | teacher
    raw["data"].pop("sequence_length")
    if "huggingface" not in raw["model"]:
        raw["model"] = config(tmp_path, "teacher")["model"] | raw["model"]
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises((ValueError, NotImplementedError), match=f"{KEY}.*{message}"):
        planned(taught(tmp_path))


def test_commands_that_know_no_teacher_say_so(tmp_path):
    write(tmp_path, "teacher")
    path = taught(tmp_path)
    shown = run("verify", path, code=2)
    assert "zinf verify does not know distillation yet" in shown.stderr
    shown = run("bench", "step", path, "--output", tmp_path / "rates.json", code=2)
    assert "zinf bench step does not know distillation yet" in shown.stderr


@pytest.mark.slow
def test_budgets_are_those_of_both_models(tmp_path):
    write(tmp_path, "teacher", model={"num_layers": 2}, memory={"device": "8MiB"})
    path = taught(tmp_path, memory={"device": "64MiB", "host": "4MiB"})
    teacher = planned(path)
    # The teacher keeps to the lower budget of both configs.
    assert teacher.planner.capacity()[Tier.DEVICE] == 8 << 20
    assert teacher.planner.capacity()[Tier.HOST] == 4 << 20
    held = teacher.held_bytes
    assert held[Tier.HOST] >= HELD_LOGITS * ROWS * LENGTH * VOCAB * 4
    assert held[Tier.DEVICE] > 0
    memory = teacher.beside().memory
    assert memory.device == (64 << 20) - held[Tier.DEVICE]
    assert memory.host == (4 << 20) - held[Tier.HOST]
    # The teacher may leave one byte, but not none.
    most = {tier: held[tier] + 1 for tier in held}
    assert replace(teacher, budgets=most).beside().memory.device == 1
    with pytest.raises(InfeasibleError):
        replace(teacher, budgets=held).beside()
    # A budget that is enough for the teacher, and leaves too little beside it.
    shown = run(
        "plan", path, "--set", f"memory.device={held[Tier.DEVICE] + 1000}", code=1
    )
    said = " ".join(shown.stdout.split())
    assert f"teacher {tmp_path / 'teacher.yaml'}: " in said
    assert "The device budget is 1,000 bytes" in said
    assert f"takes {held[Tier.DEVICE]:,} bytes of memory.device, which is not" in said


@pytest.mark.slow
def test_a_student_learns_the_same_on_every_tier_and_after_a_resume(tmp_path):
    teacher = write(
        tmp_path,
        "teacher",
        model={"num_layers": 2, "num_experts": [0, 2]},
        zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}},
    )
    shown = run("train", taught(tmp_path), code=2)
    assert "There is no folder" in shown.stderr
    run("train", teacher, "--steps", 2)
    found = {}
    for name, (params, state) in TIERS.items():
        zero = {"stage": 3, "offload_param": params, "offload_optimizer": state}
        path = taught(tmp_path, name, {"until_step": 2}, zero_optimization=zero)
        # The second one is resumed after its first step.
        for steps in (1, 3) if name == "nvme" else (3,):
            rest = ("--set", f"run.resume={name == 'nvme'}")
            shown = run("train", path, "--steps", steps, *rest)
        assert f"teacher {teacher}: " in shown.stdout
        assert f"of {tmp_path / 'teacher' / 'checkpoints' / '2'}" in shown.stdout
        found[name] = lines(tmp_path, name)
    for ours, theirs in zip(found["device"], found["nvme"], strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours.get("aux/divergence") == theirs.get("aux/divergence")
    assert [m.get("aux/divergence", 0) > 0 for m in found["device"]] == [1, 1, 0]
    alone = write(tmp_path, "alone")
    run("train", alone, "--steps", 1)
    wanted = lines(tmp_path, "alone")[0]["loss"] + found["nvme"][0]["aux/divergence"]
    assert found["nvme"][0]["loss"] == pytest.approx(wanted, rel=1e-6)
    held_to_its_plan(path)


def held_to_its_plan(path):
    """The teacher of a config holds no more than is left out of the budgets for it."""
    teacher = planned(path)
    at_work = teacher.open()
    batch = {"tokens": np.zeros((ROWS, LENGTH + 1), np.int32)}
    logits = at_work.engine.apply(teacher.logits, batch)
    assert logits.shape == (ROWS, LENGTH, VOCAB)
    for tier in Tier:
        assert at_work.engine.stores.peak_bytes(tier) <= teacher.held_bytes[tier]
    at_work.close()
