"""Models of transformers that learn from rewards: the command, and TRL's trainer."""

import json
from types import SimpleNamespace

import pytest

from tests.command import run
from tests.unit.hf.models import (
    metrics_of,
    model_folder,
    refusals,
    reloaded,
    turns,
    write,
)

from zinf import hf  # isort: skip
from zinf.core.program import Tier  # isort: skip

REWARDS = """
def evens(completions, completion_ids, answer, **_):
    assert len(answer) == len(completions)
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


async def few(completion_ids, **_):
    return [None if len(ids) > 4 else 0.0 for ids in completion_ids]
"""
FP32 = ("--set", "bf16.enabled=false")


def evens(completions, completion_ids, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def records(count=12):
    plain = [{"prompt": f"w{i} w{i + 1}", "answer": i} for i in range(count // 2)]
    chats = [{"prompt": turns(f"w{i} w2"), "answer": i} for i in range(count // 2)]
    return plain + chats


@pytest.mark.slow
def test_the_command_makes_a_model_that_does_what_is_rewarded(tmp_path):
    folder, data = model_folder(tmp_path), write(tmp_path / "p.jsonl", records())
    (tmp_path / "rewards.py").write_text(REWARDS)
    # Partly by TRL's names.
    common = ["--data", data, "--num_generations", 8, "--max_completion_length", 8]
    common += ["--reward", tmp_path / "rewards.py:evens", "--learning-rate", 2e-2]
    common += ["--reward", tmp_path / "rewards.py:few", "--samples", 32, *FP32]
    output = tmp_path / "tuned"
    run("grpo", folder, *common, "--steps", 30, "--output", output)
    metrics = metrics_of(tmp_path / "tuned.run")
    rewards = [m["reward"] for m in metrics]
    assert rewards[0] < 0.65 and max(rewards) > 0.9, rewards
    assert max(m["sampling/sampling_logp_difference/max"] for m in metrics) < 2e-5
    lines = (tmp_path / "tuned.run/completions.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert len(lines) == 30 * 32 and last["rewards"]["evens"] == last["reward"]
    conversation = next(x for x in map(json.loads, lines) if "content" in str(x))
    (answer,) = conversation["completion"]
    assert answer["role"] == "assistant" and conversation["prompt"][0]["role"] == "user"
    run("report", tmp_path / "tuned.run")
    html = (tmp_path / "tuned.run/report.html").read_text()
    assert all(f'"{title}"' in html for title in ("reward", "tokens of a completion"))
    # The tuned model loads, and draws what it learnt.
    model = reloaded(output)
    assert model.num_parameters() > 0
    run(
        "evaluate",
        output,
        "--data",
        write(tmp_path / "t.jsonl", [{"text": "w1 w2 w3"}]),
    )


def trainer(folder, output, functions=evens, *, config=None, peft=None, **named):
    named = {"max_completion_length": 6, "bf16": False, "learning_rate": 1e-2} | named
    named |= {"output_dir": output, "lr_scheduler_type": "constant"}
    args = hf.GRPOConfig(**named)
    return hf.GRPOTrainer(
        model=folder,
        reward_funcs=functions,
        args=args,
        train_dataset=records(),
        config=config,
        peft_config=peft,
    )


def numbers(output, first=0):
    names = ("step", "loss", "grad_norm", "reward", "kl", "clip_ratio/low_mean")
    return [[m.get(n) for n in names] for m in metrics_of(output)[first:]]


ADAPTER = SimpleNamespace(r=4, lora_alpha=8.0, target_modules=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "gradient_accumulation_steps": 2},
        {"beta": 0.1, "algorithm": "rloo"},
        {"beta": 0.1, "loss_type": "dr_grpo", "steps_per_generation": 2},
    ],
)
def test_a_trainer_goes_on_bit_equal_within_a_rollout(changes, tmp_path):
    folder = model_folder(tmp_path)
    peft = ADAPTER if "beta" in changes else None

    def train(name, steps, **named):
        with trainer(
            folder, tmp_path / name, max_steps=steps, peft=peft, **changes
        ) as made:
            made.train(**named)
            made.save_model(tmp_path / f"{name}.{steps}")
        return numbers(tmp_path / name)

    whole = train("whole", 4)
    train("parts", 3)
    assert train("parts", 4, resume_from_checkpoint=True) == whole
    assert len(whole) == 4 and len({tuple(x) for x in whole}) == 4


@pytest.mark.slow
def test_a_reference_of_all_weights_shares_the_budgets(tmp_path):
    """And is the model as it was: the divergence begins at rounding, and grows."""
    folder, budget = model_folder(tmp_path), 2**30
    config = {"memory": {"device": budget, "host": budget}}
    with trainer(
        folder, tmp_path / "out", config=config, beta=0.1, max_steps=3
    ) as made:
        held = made.engine.reference.held_bytes
        memory = made.engine.config.memory
        assert memory.device == budget - held[Tier.DEVICE] < budget
        assert memory.host == budget - held[Tier.HOST]
        made.train()
        assert made.engine.reference.engine.num_steps == 0
    kl = [m["kl"] for m in metrics_of(tmp_path / "out")]
    assert 0 <= kl[0] < 1e-6 < 1e-4 < kl[-1]


def test_mistakes_are_named_before_weights_are_read(tmp_path, golden):
    folder = model_folder(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)

    def correct(completions, anwser):
        return [1.0] * len(completions)

    def make(*functions, data=None, peft=None, **named):
        given = list(functions) or [evens]
        hf.GRPOTrainer(
            model=folder,
            reward_funcs=given,
            args=hf.GRPOConfig(**{"max_completion_length": 6} | named),
            train_dataset=records() if data is None else data,
            peft_config=peft,
        )

    begun = {"r": 4, "modules_to_save": ["lm_head"]}
    answered = {"prompt": turns("w1", "w2")}
    mistakes = {
        "no such argument": lambda: hf.GRPOConfig(num_generation=4),
        "a group of one": lambda: make(num_generations=1),
        "groups that do not divide": lambda: make(num_generations=3),
        "no room": lambda: make(max_completion_length=32),
        "a missing column": lambda: make(correct),
        "a reference of other adapters": lambda: make(beta=0.1, peft=begun),
        "a reward model": lambda: make(str(folder)),
        "no such function": lambda: make(f"{tmp_path}/rewards.py:even"),
        "no such file": lambda: make(f"{tmp_path}/reward.py:evens"),
        "no prompt": lambda: make(data=[{"text": "w1"}]),
        "an answer": lambda: make(data=[answered]),
        "a schedule": lambda: make(lr_scheduler_type="polynomial"),
        "no data": lambda: hf.GRPOTrainer(folder, evens),
    }
    golden.check("grpo.txt", refusals(mistakes, tmp_path))
