"""PPO: a policy and its critic in one engine, beside a reference and reward models."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    CHAT,
    WORDS,
    judge,
    llama,
    make,
    metrics_of,
    model_folder,
    on_tier,
    refusals,
    reloaded,
    save,
    tokenizer,
    write,
)

from zinf import hf  # isort: skip
from zinf.core.plan import InfeasibleError  # isort: skip
from zinf.core.program import Tier  # isort: skip
from zinf.hf.actor_critic import CRITIC, ActorCritic  # isort: skip
from zinf.hf.critic import Critic, load_critic  # isort: skip

REWARD = """
def evens(completion_ids, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""
ADAPTER = SimpleNamespace(r=4, lora_alpha=8.0, target_modules=None)
BUDGET = 2**30


def evens(completion_ids, **_):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def records(count=6):
    return [{"prompt": f"w{i} w{i + 1}"} for i in range(count)]


def trainer(folder, output, rewards, *, config=None, peft=None, value=None, **named):
    named = {"response_length": 6, "bf16": False, "learning_rate": 1e-2} | named
    named |= {"output_dir": output, "lr_scheduler_type": "constant"}
    return hf.PPOTrainer(
        folder,
        rewards,
        hf.PPOConfig(**named),
        records(),
        config=config,
        peft_config=peft,
        value_model=value,
    )


def numbers(output):
    names = ("step", "loss", "grad_norm", "reward", "objective/kl", "loss/value_avg")
    return [[m.get(n) for n in names] for m in metrics_of(output)]


@pytest.mark.slow
def test_the_command_makes_a_model_that_does_what_is_rewarded(tmp_path):
    folder, data = model_folder(tmp_path), write(tmp_path / "p.jsonl", records())
    (tmp_path / "rewards.py").write_text(REWARD)
    output = tmp_path / "tuned"
    # Partly by TRL's names; the critic begins from the model, with a new head.
    common = ["--data", data, "--reward", tmp_path / "rewards.py:evens"]
    common += ["--response_length", 8, "--learning-rate", 1e-2, "--samples", 32]
    common += ["--num_ppo_epochs", 2, "--vf-coef", 0.5, "--kl-coef", 0.01]
    common += ["--set", "bf16.enabled=false", "--set", "scheduler=null"]
    run("ppo", folder, *common, "--steps", 40, "--output", output)
    drawn = [m for m in metrics_of(tmp_path / "tuned.run") if "reward" in m]
    rewards = [m["reward"] for m in drawn]
    assert len(drawn) == 20 and rewards[0] < 0.65 and max(rewards) > 0.9, rewards
    first = drawn[0]
    assert abs(first["objective/kl"]) < 1e-5 and first["policy/approxkl_avg"] < 1e-10
    assert first["objective/scores"] == first["reward"] == first["rewards/evens/mean"]
    assert max(m["sampling/sampling_logp_difference/max"] for m in drawn) < 2e-5
    lines = (tmp_path / "tuned.run/completions.jsonl").read_text().splitlines()
    assert len(lines) == 20 * 32 and json.loads(lines[-1])["rewards"]["evens"] > 0
    assert json.loads((tmp_path / "tuned.run/run.json").read_text())
    run("report", tmp_path / "tuned.run")
    html = (tmp_path / "tuned.run/report.html").read_text()
    titles = ("reward", "KL divergence of a completion", "loss of the critic")
    assert all(f'"{title}"' in html for title in titles)
    assert reloaded(output).num_parameters() == make(llama()).num_parameters()


@pytest.mark.slow
def test_a_run_is_bit_equal_on_every_tier_and_goes_on_where_it_ended(tmp_path):
    """With two steps of each rollout twice, so that a run ends within one."""
    folder, found = model_folder(tmp_path), {}
    judge(tmp_path / "judge")
    changes = {"num_ppo_epochs": 2, "num_mini_batches": 2, "whiten_rewards": True}
    changes |= {"missing_eos_penalty": 1.0, "per_device_train_batch_size": 4}

    def train(name, steps, config, **named):
        rewards, limit = [tmp_path / "judge", evens], {"max_steps": steps}
        with trainer(
            folder, tmp_path / name, rewards, config=config, **limit, **changes
        ) as made:
            # A reward model among the rewards is what the critic begins from.
            assert made.engine.model.critic.model.name == str(tmp_path / "judge")
            frozen = [made.engine.reference.frozen, made.engine.judges[0].frozen]
            for tier in ("device", "host"):
                held = sum(x.held_bytes[Tier(tier)] for x in frozen)
                assert getattr(made.engine.config.memory, tier) == BUDGET - held
            made.train(**named)
        return numbers(tmp_path / name)

    for tier in ("device", "host", "nvme"):
        config = on_tier(tier, tmp_path)
        budgets = dict.fromkeys(("device", "host"), BUDGET)
        config["memory"] = config.get("memory", {}) | budgets
        found[tier] = train(tier, 6, config)
    assert found["device"] == found["host"] == found["nvme"]
    assert len({tuple(x) for x in found["host"]}) == 6
    train("parts", 3, config)
    assert train("parts", 6, config, resume_from_checkpoint=True) == found["nvme"]


@pytest.mark.slow
def test_adapters_are_of_both_and_the_reference_is_their_base(tmp_path):
    folder = model_folder(tmp_path)
    judge(tmp_path / "judge")
    with trainer(
        folder, tmp_path / "out", tmp_path / "judge", peft=ADAPTER, max_steps=5
    ) as made:
        engine, adapted = made.engine, made.engine.adapted
        assert engine.reference is None
        targets = {p.removeprefix(CRITIC) for p in adapted.targets if CRITIC in p}
        assert targets and targets == {p for p in adapted.targets if CRITIC not in p}
        made.train()
        # Tokens are drawn with the weights of the policy alone.
        reads = engine._decoder(None).reads
        is_of_critic = {p: f"/{CRITIC}" in p for p in engine.planner.problem.params}
        assert any(is_of_critic.values())
        assert all(reads(path) != of for path, of in is_of_critic.items())
        made.save_model(tmp_path / "adapter")
        hf.export(engine, tmp_path / "whole")
        hf.export(engine, tmp_path / "critic", part=CRITIC)
    drawn = [m for m in metrics_of(tmp_path / "out") if "objective/kl" in m]
    assert abs(drawn[0]["objective/kl"]) < 1e-5 < 1e-3 < abs(drawn[-1]["objective/kl"])
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert not config["modules_to_save"] and "critic" not in str(config)
    # What was written is read again: the policy as it is trained, and the critic.
    reloaded(tmp_path / "whole")
    assert hf.load(tmp_path / "adapter").adapter is not None
    load_critic(tmp_path / "critic").check_files()


@pytest.mark.slow
def test_a_budget_that_does_not_do_names_what_each_model_takes(tmp_path):
    folder = model_folder(tmp_path)
    judge(tmp_path / "judge")
    wanted = {
        # The policy with its critic, beside those that were placed first.
        700_000: (
            "The reference (MODEL) holds",
            "of host, which is not in these budgets",
            "The reward model judge (JUDGE) holds",
            "The policy MODEL keeps",
            "The critic JUDGE keeps",
        ),
        # A quarter of this is too small for one of those.
        300_000: ("This is the reference, which may have 1/4",),
    }
    for host, parts in wanted.items():
        config = on_tier("host", tmp_path) | {"memory": {"device": 2**23, "host": host}}
        with pytest.raises(InfeasibleError) as error:
            trainer(folder, tmp_path / "out", tmp_path / "judge", config=config)
        text = str(error.value).replace(str(folder), "MODEL")
        text = text.replace(str(tmp_path / "judge"), "JUDGE")
        assert all(part in text for part in parts), text


def test_values_are_those_of_the_critic_alone(tmp_path):
    """And log-probabilities those of the policy, from the parameters of both."""
    policy = hf.load(model_folder(tmp_path))
    judge(tmp_path / "judge")
    critic = Critic(load_critic(tmp_path / "judge"))
    both = ActorCritic(policy, critic)
    assert both.num_parameters == policy.num_parameters + critic.model.num_parameters
    files, weights = both.open_weights()
    with files:
        params = {name: jnp.asarray(weights.whole(name)) for name in weights.specs}
    batch = {"input_ids": jnp.arange(12).reshape(2, 6)}
    own = {n: x for n, x in params.items() if not n.startswith(CRITIC)}
    theirs = {n.removeprefix(CRITIC): params[n] for n in params if n not in own}
    pairs = (
        (both.values(params, batch), critic.values(theirs, batch)),
        (
            both.token_log_probabilities(params, batch),
            policy.token_log_probabilities(own, batch),
        ),
    )
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted)


def test_mistakes_are_named_before_weights_are_read(tmp_path, golden):
    folder = model_folder(tmp_path)
    judge(tmp_path / "judge")
    judge(tmp_path / "other")
    words = tmp_path / "other/tokenizer.json"
    swapped = words.read_text().replace('"w1":', '"?":').replace('"w2":', '"w1":')
    words.write_text(swapped.replace('"?":', '"w2":'))
    save(llama(vocab_size=len(WORDS) - 1), tmp_path / "small")
    tokenizer(chat_template=CHAT).save_pretrained(tmp_path / "small")

    def make_trainer(*rewards, value=None, peft=None, **named):
        trainer(folder, tmp_path / "o", list(rewards), value=value, peft=peft, **named)

    begun = {"r": 4, "begin_from": str(tmp_path / "adapter")}
    mistakes = {
        "no such argument": lambda: hf.PPOConfig(klcoef=0.1),
        "no reward": make_trainer,
        "no room": lambda: make_trainer(evens, response_length=31),
        "a critic of fewer words": lambda: make_trainer(
            evens, value=tmp_path / "small"
        ),
        "a critic of another tokenizer": lambda: make_trainer(tmp_path / "other"),
        "adapters that were trained": lambda: make_trainer(evens, peft=begun),
        "a negative factor": lambda: make_trainer(evens, kl_coef=-1.0),
        "another estimator": lambda: make_trainer(evens, kl_estimator="k2"),
    }
    golden.check("ppo.txt", refusals(mistakes, tmp_path))
