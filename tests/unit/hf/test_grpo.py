"""Models of transformers that learn from rewards: the command, and TRL's trainer."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import (
    VOCAB,
    judge,
    metrics_of,
    model_folder,
    on_tier,
    refusals,
    reloaded,
    turns,
    write,
)

import jax  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip
from PIL import Image  # isort: skip

import zinf  # isort: skip
from tests.unit.hf import images  # isort: skip
from zinf import hf  # isort: skip
from zinf.core.config import Config  # isort: skip
from zinf.core.plan import InfeasibleError  # isort: skip
from zinf.core.program import Tier  # isort: skip
from zinf.core.rollouts.environment import UnreadableReply  # isort: skip
from zinf.core.rollouts import Prompt, Samples  # isort: skip
from zinf.hf.images.reader import ImageReader  # isort: skip
from zinf.hf.card import card_of, run_of  # isort: skip
from zinf.hf.judge import judges_among, load_judge  # isort: skip
from zinf.hf.trainers import adapter_section  # isort: skip
from zinf.hf.objectives.from_rewards import prompts_of  # isort: skip
from zinf.hf.prefill import Prefill  # isort: skip
from zinf.hf.reply import check_template, reply_tokens  # isort: skip
from zinf.observe.record import read_record  # isort: skip

REWARDS = """
def evens(completions, completion_ids, answer, **_):
    assert len(answer) == len(completions)
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def reply(prompts, completions, turns, seeds):
    return [
        None if turn > 2 else f"w{seed % 7} w9"
        for turn, seed in zip(turns, seeds, strict=True)
    ]


async def few(completion_ids, **_):
    return [None if len(ids) > 4 else 0.0 for ids in completion_ids]
"""
FP32 = ("--set", "bf16.enabled=false")


def reply(completions, turns, seeds, **_):
    return [
        None if turn > 2 else f"w{seed % 7}"
        for turn, seed in zip(turns, seeds, strict=True)
    ]


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
    judge(tmp_path / "judge", chat_template=OF_JUDGE)
    common += ["--reward", tmp_path / "judge"]
    common += [part for x in (1, 1, 0) for part in ("--reward-weights", x)]
    output = tmp_path / "tuned"
    run("grpo", folder, *common, "--steps", 30, "--output", output)
    metrics = metrics_of(tmp_path / "tuned.run")
    rewards = [m["reward"] for m in metrics]
    assert rewards[0] < 0.65 and max(rewards) > 0.9, rewards
    assert max(m["sampling/sampling_logp_difference/max"] for m in metrics) < 2e-5
    lines = (tmp_path / "tuned.run/completions.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert len(lines) == 30 * 32 and last["rewards"]["evens"] == last["reward"]
    assert all("rewards/judge/mean" in m for m in metrics)
    conversation = next(x for x in map(json.loads, lines) if "content" in str(x))
    (answer,) = conversation["completion"]
    assert answer["role"] == "assistant" and conversation["prompt"][0]["role"] == "user"
    run("report", tmp_path / "tuned.run")
    html = (tmp_path / "tuned.run/report.html").read_text()
    assert all(f'"{title}"' in html for title in ("reward", "tokens of a completion"))
    # The tuned model loads, and draws what it learnt.
    card = (output / "README.md").read_text()
    assert "rewards.py:" in card and str(tmp_path) not in card
    model = reloaded(output)
    assert model.num_parameters() > 0
    run(
        "evaluate",
        output,
        "--data",
        write(tmp_path / "t.jsonl", [{"text": "w1 w2 w3"}]),
    )


def trainer(
    folder, output, functions=evens, *, config=None, peft=None, play=None, **named
):
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
        environment=play,
    )


# A template with a line feed behind each turn, as many have it.
LINES = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' and not "
    "messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{{ m.role }} {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
# The last message has no end, and those before it have one.
OPEN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} "
    "{% if not loop.last %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}</s>assistant {% endif %}"
)
OTHERWISE = "{% for m in messages %}{{ m.role }}{{ '!' if loop.last }}{% endfor %}"


def test_tokens_of_a_reply_follow_the_turn_before(tmp_path):
    model = hf.load(model_folder(tmp_path))
    words = model.tokenizer
    assert reply_tokens(model, "w1 w2") == words("w1 w2").input_ids
    for template, role in (
        (words.chat_template, "user"),
        (LINES, "user"),
        (OPEN, "user"),
        (TOOLS, "tool"),
    ):
        words.chat_template = template
        check_template(model)
        said = [*turns("w1", "w2"), {"role": role, "content": "w3"}]
        said[1]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]

        def laid_out(messages, asks, words=words):
            named = {"tokenize": False, "add_generation_prompt": asks}
            text = words.apply_chat_template(messages, **named)
            return words(text, add_special_tokens=False).input_ids

        # As if all were laid out anew, but the turn stays what was drawn.
        drawn = laid_out(said[:1], True) + words("w2 </s>").input_ids
        assert drawn + reply_tokens(model, said[2:]) == laid_out(said, True)
    with pytest.raises(UnreadableReply, match="refuses the reply.*no call"):
        reply_tokens(model, [turns("w1")[0], said[2], said[2]])
    words.chat_template = OTHERWISE
    with pytest.raises(ValueError, match="lays a turn out otherwise"):
        check_template(model)


def often_ending(tmp_path):
    """A model whose turns end at any of several tokens, so that there are several."""
    folder = model_folder(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, *range(10, VOCAB, 5)]}))
    return folder


@pytest.mark.slow
def test_the_command_has_an_environment_reply(tmp_path):
    folder, data = often_ending(tmp_path), write(tmp_path / "p.jsonl", records())
    (tmp_path / "rewards.py").write_text(REWARDS)
    file = tmp_path / "rewards.py"
    common = ["--data", data, "--num_generations", 4, "--max_completion_length", 20]
    common += ["--reward", f"{file}:evens", "--environment", f"{file}:reply"]
    common += ["--samples", 8, *FP32]
    common += ["--max_tool_calling_iterations", 3, "--steps", 2]
    run("grpo", folder, *common, "--output", tmp_path / "tuned")
    metrics = metrics_of(tmp_path / "tuned.run")
    assert max(m["sampling/sampling_logp_difference/max"] for m in metrics) < 2e-5
    text = (tmp_path / "tuned.run/completions.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert max(line["num_turns"] for line in lines) > 1
    for line in lines:
        assert line["num_own_tokens"] <= line["num_tokens"] <= 20
        if isinstance(line["completion"], list):
            roles = [m["role"] for m in line["completion"]]
            assert roles[::2] == ["assistant"] * line["num_turns"]


def numbers(output, first=0):
    names = ("step", "loss", "grad_norm", "reward", "kl", "clip_ratio/low_mean")
    return [[m.get(n) for n in names] for m in metrics_of(output)[first:]]


ADAPTER = SimpleNamespace(r=4, lora_alpha=8.0, target_modules=None)
SYNCED = {
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.75,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "play": reply},
        {"beta": 0.1, "algorithm": "rloo"},
        {"beta": 0.1, "loss_type": "dr_grpo", "steps_per_generation": 2},
        {"beta": 0.1, **SYNCED},
    ],
)
def test_a_trainer_goes_on_bit_equal_within_a_rollout(changes, tmp_path):
    folder = often_ending(tmp_path)
    is_synced = "sync_ref_model" in changes
    peft = ADAPTER if "beta" in changes and not is_synced else None

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
    written = [read_record(tmp_path / name) for name in ("whole", "parts")]
    assert [(x.after_step, x.num_steps) for x in written] == [(0, 4), (3, 4)]
    assert written[0].config["grpo"]["beta"] == changes.get("beta", 0)
    run("report", tmp_path / "whole")
    assert len(whole) == 4 and len({tuple(x) for x in whole}) == 4


@pytest.mark.slow
def test_a_reference_of_all_weights_shares_the_budgets(tmp_path):
    """And is the model as it was: the divergence begins at rounding, and grows."""
    folder, budget = model_folder(tmp_path), 2**30
    config = {"memory": {"device": budget, "host": budget}}
    with trainer(
        folder, tmp_path / "out", config=config, beta=0.1, max_steps=3
    ) as made:
        held = made.engine.reference.frozen.held_bytes
        memory = made.engine.config.memory
        assert memory.device == budget - held[Tier.DEVICE] < budget
        assert memory.host == budget - held[Tier.HOST]
        made.train()
        assert made.engine.reference.frozen.engine.num_steps == 0
    kl = [m["kl"] for m in metrics_of(tmp_path / "out")]
    assert 0 <= kl[0] < 1e-6 < 1e-4 < kl[-1]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_reference_that_is_synced_is_the_model_mixed_into_it(tier, tmp_path):
    folder, config = model_folder(tmp_path), on_tier(tier, tmp_path)
    named = {"beta": 0.1, "max_steps": 2, **SYNCED}
    with trainer(folder, tmp_path / "out", config=config, **named) as made:
        engine, path = made.engine, "model.norm.weight"
        assert engine.reference is None
        before = engine.get(path)
        np.testing.assert_array_equal(engine.get(path, "reference"), before)
        made.train()
        mixed = 0.25 * before + 0.75 * engine.get(path)
        found = engine.get(path, "reference")
        np.testing.assert_allclose(found, mixed, rtol=1e-6)
        # After the move the model is nearer to it than to what it was.
        batch = next(iter(made.rollouts))
        scored = {name: batch[name] for name in ("input_ids", "labels")}
        own = engine.log_probabilities(scored)
        reference = engine.log_probabilities(scored, kind="reference")
        gap = np.abs(own - reference).max()
        assert 0 < gap < 0.5 * np.abs(own).max()
    kl = [m["kl"] for m in metrics_of(tmp_path / "out")]
    assert 0 <= kl[0] < 1e-6 < kl[1]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_model_learns_from_a_teacher_without_rewards(tier, tmp_path):
    folder, config = model_folder(tmp_path), on_tier(tier, tmp_path)
    changes = {"num_hidden_layers": 1, "initializer_range": 0.3}
    teacher = model_folder(tmp_path / "teacher", **changes)
    named = {"teacher": str(teacher), "kl_penalty_coef": 2.0, "max_steps": 8}
    named |= {"per_device_train_batch_size": 32}
    with trainer(folder, tmp_path / "out", [], config=config, **named) as made:
        found = made.engine.teacher.frozen
        assert found.title == "the teacher" and found.name == str(teacher)
        made.train()
        for tier_ in Tier:
            assert found.engine.stores.peak_bytes(tier_) <= found.held_bytes[tier_]
    gaps = [m["teacher_kl"] for m in metrics_of(tmp_path / "out")]
    assert gaps[0] > 0 and min(gaps[-3:]) < 0.7 * gaps[0], gaps


TIERS = ("device", "host")
# Not that of the model in training: a reward model has a template of its own.
OF_JUDGE = "{% for m in messages %}{{ m.role }} w3 {{ m.content }} {% endfor %}w4"


def torch_score(model, prompt, completion):
    """What TRL has a reward model say of a prompt and a completion."""
    words = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
    text = prompt + completion if isinstance(prompt, str) else ""
    text = text or words.apply_chat_template([*prompt, *completion], tokenize=False)
    ids = words(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.slow
def test_a_reward_model_says_what_it_says_in_transformers(tmp_path):
    """From every tier the same, beside functions, within the budgets of all."""
    folder, budget = model_folder(tmp_path), 2**30
    judge(tmp_path / "judge", chat_template=OF_JUDGE)
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(tmp_path / "judge", attn_implementation="eager")
    found = {}
    for tier in ("device", "nvme"):
        config = on_tier(tier, tmp_path)
        config["memory"] = config.get("memory", {}) | dict.fromkeys(TIERS, budget)
        named = {"reward_weights": [0.5, 1.0], "beta": 0.1, "max_steps": 2}
        rewards = [tmp_path / "judge", evens]
        with trainer(folder, tmp_path / tier, rewards, config=config, **named) as made:
            engine = made.engine
            frozen = [engine.reference.frozen, engine.judges[0].frozen]
            for name in TIERS:
                held = sum(x.held_bytes[Tier(name)] for x in frozen)
                assert getattr(engine.config.memory, name) == budget - held < budget
            made.train()
            # Measured with the largest batch, so no step holds more.
            for x in frozen:
                for each in Tier:
                    assert x.engine.stores.peak_bytes(each) <= x.held_bytes[each]
        text = (tmp_path / tier / "completions.jsonl").read_text()
        found[tier] = numbers(tmp_path / tier), text
    assert found["device"] == found["nvme"]
    lines = [json.loads(line) for line in found["nvme"][1].splitlines()]
    assert {type(line["prompt"]) for line in lines} == {str, list}
    for line in lines:
        by = line["rewards"]
        wanted = torch_score(theirs, line["prompt"], line["completion"])
        assert abs(by["judge"] - wanted) < 1e-5
        assert line["reward"] == 0.5 * by["judge"] + by["evens"]
    assert len({line["rewards"]["judge"] for line in lines}) > len(lines) / 2
    # A quarter of the device has no room for it, and the message says whose it is.
    config["memory"]["device"] = 4 * 40_000
    with pytest.raises(InfeasibleError, match="model judge, which may have 1/4"):
        trainer(folder, tmp_path / "small", [tmp_path / "judge"], config=config)


def test_a_text_that_a_reward_model_cannot_read_is_left_out(tmp_path):
    judge(tmp_path / "judge", chat_template="{{ raise_exception('no user') }}")
    made = load_judge(tmp_path / "judge")
    own = replace(made, longest=3, prefill=Prefill(made.model, made.model.logits))
    for prompt, answer, reason in (
        ("w1 w2", " w3 w4", "makes 4 tokens of the text, and it reads 1 to 3"),
        (turns("w1"), turns("w1"), "refuses the conversation: no user"),
    ):
        samples = Samples([prompt], [answer], [[1]], {})
        values, failures = own.scores(samples)
        assert np.isnan(values[0]) and reason in failures[0]


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    raw = {
        "model": {"huggingface": str(tmp_path / "model")},
        "data": {"objective": "grpo", "paths": [str(tmp_path / "p.jsonl")]},
        "train_batch_size": 8,
        "grpo": {"teacher": str(tmp_path / "teacher"), "rewards": ["org/judge"]},
        "adapter": {"begin_from": str(tmp_path / "begun"), "target_modules": "q" * 999},
        "zero_optimization": {
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
        },
    }
    run = run_of(Config.load(raw), tmp_path / "metrics.jsonl")
    card = card_of("org/model", adapter=True, run=run)
    assert str(tmp_path) not in card
    assert "teacher: teacher" in card and "org/judge" in card and "q" * 999 in card


def test_what_peft_says_of_an_adapter_is_a_section_or_named(caplog):
    neutral = {"r": 2, "bias": "none", "rank_pattern": {}, "task_type": "CAUSAL_LM"}
    named = {"target_modules": {"v_proj", "q_proj"}, "ensure_weight_tying": False}
    section = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    assert adapter_section(SimpleNamespace(**neutral, **named)) == section
    assert not caplog.text
    assert adapter_section(SimpleNamespace(**neutral)) == {"r": 2}
    assert "no target_modules: all linear layers get adapters" in caplog.text


def test_mistakes_are_named_before_weights_are_read(tmp_path, golden):
    folder = model_folder(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    judge(tmp_path / "judge")
    classifier = judge(tmp_path / "classifier", num_labels=2)

    def correct(completions, anwser):
        return [1.0] * len(completions)

    adapted = hf.load(folder)
    adapted.adapter = SimpleNamespace(folder=tmp_path / "adapter")

    def make(*functions, data=None, peft=None, model=folder, **named):
        given = list(functions) or [evens]
        hf.GRPOTrainer(
            model=model,
            reward_funcs=given,
            args=hf.GRPOConfig(**{"max_completion_length": 6} | named),
            train_dataset=records() if data is None else data,
            peft_config=peft,
        )

    def from_file():
        raw = {"model": {"huggingface": str(folder)}, "train_batch_size": 8}
        raw |= {"data": {"objective": "grpo", "paths": str(tmp_path / "empty.jsonl")}}
        prompts_of(hf.load(folder), Config.load(raw))

    (tmp_path / "empty.jsonl").touch()
    short = model_folder(tmp_path / "short", max_position_embeddings=4)
    begun = {"r": 4, "modules_to_save": ["lm_head"]}
    answered = {"prompt": turns("w1", "w2")}
    mistakes = {
        "no such argument": lambda: hf.GRPOConfig(num_generation=4),
        "prompts to be cut": lambda: hf.GRPOConfig(max_prompt_length=4),
        "a group of one": lambda: make(num_generations=1),
        "groups that do not divide": lambda: make(num_generations=3),
        "no room": lambda: make(max_completion_length=32),
        "a missing column": lambda: make(correct),
        "a teacher of short texts": lambda: make(teacher=str(short)),
        "a reference of other adapters": lambda: make(beta=0.1, peft=begun),
        "a model with an adapter": lambda: make(model=adapted),
        "adapters of some layers": lambda: make(peft={"layers_to_transform": [0]}),
        "a reward model of two labels": lambda: make(str(tmp_path / "classifier")),
        "a reward model without a template": lambda: make(tmp_path / "judge"),
        "a model of another kind": lambda: make(str(folder)),
        "a model of torch": lambda: make(classifier),
        "no such function": lambda: make(f"{tmp_path}/rewards.py:even"),
        "no such file": lambda: make(f"{tmp_path}/reward.py:evens"),
        "no such environment": lambda: make(environment=f"{tmp_path}/play.py:reply"),
        "replies of nobody": lambda: make(max_tool_calling_iterations=2),
        "no prompt": lambda: make(data=[{"text": "w1"}]),
        "an answer": lambda: make(data=[answered]),
        "a schedule": lambda: make(lr_scheduler_type="polynomial"),
        "an empty file": from_file,
        "no data": lambda: hf.GRPOTrainer(folder, evens),
    }
    golden.check("grpo.txt", refusals(mistakes, tmp_path))
    raw = {"model": {"huggingface": str(folder)}, "train_batch_size": 8}
    raw |= {"data": {"objective": "grpo"}, "grpo": {"rewards": ["rewards.py:evens"]}}
    run_file = tmp_path / "grpo.yaml"
    run_file.write_text(json.dumps(raw))
    shown = run("evaluate", run_file, code=2)
    assert "zinf evaluate does not know data.objective grpo yet" in shown.stderr


def test_arguments_of_trl_without_effect_are_named(caplog):
    hf.GRPOConfig(use_vllm=True, report_to="wandb", log_completions=False)
    (record,) = caplog.records
    assert "ignores use_vllm, report_to" in record.getMessage()


@pytest.mark.slow
def test_completions_of_prompts_with_images_are_rewarded(tmp_path):
    """The tokens are drawn with the probabilities that the training program gives."""
    folder = images.model_folder("qwen2_vl", tmp_path / "model")
    for i in range(3):
        images.picture(i, 12 + 8 * i, 20).save(tmp_path / f"{i}.png")
    asked = [turns("w1 w2"), turns("w3"), turns("w4 w5")]
    shown = [["0.png"], ["1.png", "2.png"], None]
    lines = [
        {"prompt": prompt, "images": names, "answer": 0}
        for prompt, names in zip(asked, shown, strict=True)
    ]
    data = write(tmp_path / "p.jsonl", lines)
    (tmp_path / "rewards.py").write_text(REWARDS)
    images.judge(tmp_path / "judge")
    given = "grpo", folder, "--data", data, "--num_generations", 4, *FP32
    given += "--reward", tmp_path / "rewards.py:evens", "--samples", 12, "--beta", 0.1
    given += "--reward", tmp_path / "judge", "--reward-weights", 1
    given += "--reward-weights", 0
    given += "--max_completion_length", 6, "--learning-rate", 2e-2, "--steps", 8
    for name, more in (("fused", ()), ("streamed", ("--set", "execution=streamed"))):
        run(*given, "--output", tmp_path / name, *more)
        metrics = metrics_of(tmp_path / f"{name}.run")
        assert max(m["sampling/sampling_logp_difference/max"] for m in metrics) < 2e-5
        assert all(np.isfinite(m["rewards/judge/mean"]) for m in metrics)
        rewards = [m["reward"] for m in metrics]
        assert np.mean(rewards[-2:]) > np.mean(rewards[:2]), rewards


def test_prompts_that_are_dropped_are_no_samples_and_reward_models_read_none(tmp_path):
    folder = images.model_folder("qwen2_vl", tmp_path / "model")
    images.judge(tmp_path / "judge")
    images.picture(0, 12, 20).save(tmp_path / "0.png")
    lines = [
        {"prompt": turns("w1"), "images": ["0.png"] * count} for count in (1, 8, 1)
    ]
    config = Config.load(
        {
            "model": {"huggingface": str(folder)},
            "data": {
                "objective": "grpo",
                "paths": [str(write(tmp_path / "p.jsonl", lines))],
                "sequence_length": 48,
                "too_long": "drop",
                "images": 64,
            },
            "grpo": {
                "rewards": [str(tmp_path / "judge")],
                "num_generations": 2,
                "max_completion_length": 8,
            },
        }
    )
    task = hf.Task(config)
    short, long, _ = (len(p.tokens) for p in prompts_of(task.model, config))
    assert short < 48 - 8 < long
    (made,) = task.objective.drawing.judges(config)
    assert len(made.most.beside.contents) == 1
    assert task.steps_of_epochs(2, 1.0, print) == 2


def test_a_reward_model_sees_the_images_of_prompts_as_in_transformers(tmp_path):
    """It has room for them before a step, and its scores are equal on all tiers."""
    theirs = images.judge(tmp_path / "judge")
    for i in range(3):
        images.picture(i, 12 + 8 * i, 20).save(tmp_path / f"{i}.png")
    shown = [["0.png"], ["1.png", "2.png"], []]
    place, text = {"type": "image"}, {"type": "text", "text": "w1 w2"}
    contents = [[*[place] * len(names), text] for names in shown]
    prompts = [
        Prompt(
            np.zeros(3, np.int32),
            [{"role": "user", "content": content}],
            beside=tuple((tmp_path / name).read_bytes() for name in names),
        )
        for content, names in zip(contents, shown, strict=True)
    ]
    answers = [[{"role": "assistant", "content": f"w{i} w5"}] for i in range(3)]
    samples = Samples(
        [p.shown for p in prompts], answers, [[1]] * 3, {}, [p.beside for p in prompts]
    )
    made = load_judge(tmp_path / "judge")
    made.check(prompts)
    (made,) = judges_among([made, evens], prompts)
    processor = ImageReader(made.model).processor
    found = {}
    for tier in ("device", "host", "nvme"):
        config = Config.load(on_tier(tier, tmp_path))
        shape = {"rows": 3, "length": 32, "number": 1}
        opened = made.open(config, zinf.make_mesh(jax.devices()[:1]), **shape)
        values, failures = opened.scores(samples)
        for each in Tier:
            peak = opened.frozen.engine.stores.peak_bytes(each)
            assert peak <= opened.frozen.held_bytes[each]
        opened.close()
        assert not failures
        found[tier] = values.tolist()
    assert found["device"] == found["host"] == found["nvme"]
    for value, content, answer, names in zip(
        found["host"], contents, answers, shown, strict=True
    ):
        said = [{"type": "text", "text": answer[0]["content"]}]
        talk = [{"role": "user", "content": content}]
        talk.append({"role": "assistant", "content": said})
        text = processor.apply_chat_template(talk)
        seen = {"images": [[Image.open(tmp_path / x) for x in names]]} if names else {}
        given = processor(text=[text], return_tensors="pt", **seen)
        with torch.no_grad():
            wanted = theirs(**given, use_cache=False).logits
        assert value == pytest.approx(wanted.item(), rel=1e-5)
    judge(tmp_path / "blind", chat_template=OF_JUDGE)
    with pytest.raises(ValueError, match="has images, and the reward model .* reads t"):
        load_judge(tmp_path / "blind").check(prompts)
    (tmp_path / "judge/processor_config.json").unlink()
    (tmp_path / "judge/preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="has no processor of images"):
        load_judge(tmp_path / "judge").check(prompts)
