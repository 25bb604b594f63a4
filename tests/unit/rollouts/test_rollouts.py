"""Completions of the engine in training, as batches of its steps."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.tiers import streamed
from zinf.checkpoint import Checkpoints
from zinf.core import rl
from zinf.core.config.grpo import Grpo
from zinf.core.config.ppo import Ppo
from zinf.core.rollouts import PpoRollouts, Prompt, Rewards, Rollouts, policy_loss
from zinf.distributed import Alone
from zinf.inference import Scored
from zinf.models import GPT, GPTConfig

LETTERS = "\0abcdefghijklmnopqrstuvwxyz "
END, ENDS = 0, (0, 27)


def share_of_e(completions, **_):
    return [c.count("e") / max(1, len(c)) for c in completions]


def prompts(count=8):
    rng = np.random.default_rng(0)
    return [
        Prompt(
            rng.integers(1, 27, rng.integers(4, 9)).astype(np.int32),
            f"prompt {i}",
            {"number": i},
            f"record {i}",
        )
        for i in range(count)
    ]


def rollouts(settings, *, given=None, rewards=share_of_e, kind=Rollouts, **named):
    named = {"length": 25, "batch_size": 8, "eos_token_ids": (END,)} | named
    return kind(
        prompts() if given is None else given,
        Rewards([rewards]),
        settings,
        decode=lambda ids: "".join(LETTERS[i] for i in ids if i),
        **named,
    )


@dataclass
class Drawing:
    """Stands in for an engine: texts follow from the keys alone."""

    asked: list = field(default_factory=list)
    read: list = field(default_factory=list)
    planner = SimpleNamespace(group=Alone(), batch_share=(0, 1))

    def sample(self, prompts, *, num_samples=1, key, max_new_tokens, **asked):
        self.asked.append(asked)
        self.read += [[*map(int, p)] for p in prompts for _ in range(num_samples)]
        found = []
        for number in range(len(prompts) * num_samples):
            one = key[number] if key.ndim else jax.random.fold_in(key, number)
            rng = np.random.default_rng(np.asarray(jax.random.key_data(one)))
            tokens = rng.integers(1, 27, rng.integers(1, max_new_tokens + 1)).tolist()
            if len(tokens) < max_new_tokens:
                tokens[-1] = int(rng.choice(asked["eos_token_ids"]))
            values = rng.uniform(-3, 0, len(tokens)).astype(np.float32)
            none = np.zeros((len(tokens), 0))
            found.append(Scored(tokens, values, -values, none, none))
        return np.array(found, object).reshape(-1, num_samples).tolist()

    def log_probabilities(self, batch, *, temperature, num_microbatches):
        self.asked.append({"scored at": temperature, "in": num_microbatches})
        return np.where(batch["labels"][:, 1:] != -100, -1.0, 0.0)


def test_a_batch_has_what_was_drawn_and_what_it_weighs():
    # Padding is a token that ends texts, and two tokens do: no mask is guessed.
    settings = Grpo(num_generations=4, max_completion_length=6, temperature=0.7)
    engine, seen = Drawing(), {}

    def keep(prompts, completion_ids, number, **_):
        seen.update(prompts=prompts, ids=completion_ids, number=number)
        return [float(len(x)) for x in completion_ids]

    data = rollouts(settings, rewards=keep, padding=END, eos_token_ids=ENDS)
    batch = next(iter(data.of(engine)))
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
        n: (x.shape, x.dtype) for n, x in data.spec().items()
    }
    by_text = {p.shown: p for p in data.prompts}
    for row, (shown, ids) in enumerate(zip(seen["prompts"], seen["ids"], strict=True)):
        prompt = by_text[shown]
        start, stop = len(prompt.tokens), len(prompt.tokens) + len(ids)
        # The token that ends a completion is trained on, and none of the padding.
        assert batch["input_ids"][row, :stop].tolist() == [*prompt.tokens, *ids]
        assert not batch["input_ids"][row, stop:].any()
        labels = batch["labels"][row]
        assert labels[start:stop].tolist() == ids and (labels == -100).sum() == 25 - (
            stop - start
        )
        is_own = np.zeros(24)
        is_own[start - 1 : stop - 1] = 1
        np.testing.assert_array_equal(batch["weights"][row] != 0, is_own)
        np.testing.assert_array_equal(batch["advantages"][row] != 0, is_own)
        assert seen["number"][row] == prompt.columns["number"]
    # Each prompt has a group, whose advantages are none together.
    assert seen["prompts"][:4] == seen["prompts"][:1] * 4
    sums = batch["advantages"].max(1) + batch["advantages"].min(1)
    np.testing.assert_allclose(sums.reshape(2, 4).sum(1), 0, atol=1e-5)
    # dapo: a mean over the tokens of the step.
    np.testing.assert_allclose(batch["denominators"].sum(), batch["weights"].sum())
    drawing, scoring = engine.asked
    assert drawing["temperature"] == scoring["scored at"] == 0.7
    assert drawing["eos_token_ids"] == ENDS
    # By several tokens some texts ended, and only others count as cut off.
    is_cut = [x[-1] not in ENDS for x in seen["ids"]]
    metrics = {"step": 1}
    data.told.after_step(metrics)
    assert metrics["completions/clipped_ratio"] == np.mean(is_cut)
    lengths = [len(x) for x in seen["ids"]]
    assert metrics["reward"] == metrics["completions/mean_length"] == np.mean(lengths)


def test_completions_without_reward_or_end_are_left_out():
    settings = Grpo(
        num_generations=4, max_completion_length=3, mask_truncated_completions=True
    )
    seen = []

    def some(completion_ids, **_):
        seen[:] = completion_ids
        return [None, *map(float, range(7))]

    data = rollouts(settings, rewards=some)
    batch = next(iter(data.of(Drawing())))
    is_kept = [n > 0 and ids[-1] == END for n, ids in enumerate(seen)]
    assert 0 < sum(is_kept) < 7
    np.testing.assert_array_equal((batch["weights"] != 0).any(1), is_kept)
    # What was drawn is scored all the same.
    assert (batch["labels"] != -100).any(1).all()


def test_ppo_weighs_each_token_by_a_critic_and_a_reference():
    """A row without a reward has no part in it, and whitening is over all others."""
    settings = Ppo(
        response_length=6,
        num_ppo_epochs=2,
        missing_eos_penalty=2.0,
        kl_coef=0.5,
        gamma=0.9,
    )
    seen = []

    def some(completion_ids, **_):
        seen[:] = completion_ids
        return [None, *map(float, range(15))]

    data = rollouts(settings, rewards=some, kind=PpoRollouts, batch_size=16)
    with pytest.raises(ValueError, match=r"ppo.kl_coef is 0.5.*set ppo.kl_coef to 0"):
        data.of(Drawing())
    data = data.valued_by(lambda batch: np.full((16, 24), 3.0, np.float32))
    reference = lambda batch: np.full((16, 24), -1.5, np.float32)  # noqa: E731
    iterator = iter(data.of(Drawing(), reference))
    whole = next(iterator)
    same(whole, next(iterator))
    kept = whole["labels"][:, 1:] != -100
    kept[0] = False
    np.testing.assert_array_equal(whole["weights"] != 0, kept)
    scores = np.array([0.0, *range(15)]) - [2.0 * (ids[-1] != END) for ids in seen]
    # The model in training says -1 of each token, and the reference -1.5.
    rewards = np.where(kept, -0.5 * 0.5, 0.0)
    for row, own in enumerate(kept):
        if own.any():
            rewards[row, np.flatnonzero(own)[-1]] += scores[row]
    values = np.where(kept, 3.0, 0.0)
    advantages, returns = rl.generalized_advantages(rewards, values, kept, gamma=0.9)
    np.testing.assert_allclose(whole["returns"], returns, rtol=1e-6)
    wanted = rl.whitened(advantages, kept)
    np.testing.assert_allclose(whole["advantages"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole["old_values"], values)
    np.testing.assert_allclose(whole["denominators"], kept.sum() / 16)
    metrics = {"step": 1}
    data.told.after_step(metrics)
    lengths = kept.sum(1)[kept.any(1)]
    np.testing.assert_allclose(metrics["objective/kl"], 0.5 * lengths.mean())
    np.testing.assert_allclose(
        metrics["objective/scores"], scores[kept.any(1)].mean(), rtol=1e-6
    )
    assert metrics["val/num_eos_tokens"] == sum(ids[-1] == END for ids in seen)


@pytest.mark.parametrize("top", [1.0, 0.5])
def test_corrections_are_where_the_loss_reads_them(top):
    """vespo weighs a completion by its tokens' corrections; others multiply by them."""
    few = {"num_generations": 4, "max_completion_length": 6}
    few |= {"top_entropy_quantile": top, "importance_sampling_mode": "token_truncate"}
    plain, vespo = (
        next(iter(rollouts(Grpo(**few, loss_type=name)).of(Drawing())))
        for name in ("dapo", "vespo")
    )
    own = vespo["weights"] != 0
    ratios = vespo["importance_ratios"][own]
    # Drawn with log-probabilities of -3 to 0, and scored with -1.
    assert ratios.min() < 1 and ratios.max() == 3
    kept = vespo.get("policy_weights", np.ones(own.shape))[own]
    np.testing.assert_array_equal(plain["policy_weights"][own], ratios * kept)
    assert ("policy_weights" in vespo) == (top < 1) and (kept.min() == 0) == (top < 1)


def same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_completions_are_used_as_often_as_asked_and_a_resume_goes_on_within():
    settings = Grpo(
        num_generations=4,
        max_completion_length=6,
        steps_per_generation=4,
        num_iterations=2,
    )
    data = rollouts(settings, num_microbatches=2)
    engine = Drawing()
    iterator = iter(data.of(engine))
    states, batches = [], []
    for _ in range(6):
        batches.append(next(iterator))
        states.append(json.dumps(_texts(iterator.get_state())))
    # Of 16 completions there are two batches, twice; then others.
    same(batches[0], batches[2])
    same(batches[1], batches[3])
    assert (batches[0]["input_ids"] != batches[4]["input_ids"]).any()
    assert "old_logps" in batches[0]
    for number in range(5):
        engine.asked.clear()
        another = iter(rollouts(settings, num_microbatches=2).of(engine))
        another.set_state(_arrays(json.loads(states[number])))
        same(next(another), batches[number + 1])
        # The model is another one by then, and is not asked again for these.
        assert bool(engine.asked) == (number == 3)


def _texts(state):
    return {n: x.hex() if isinstance(x, bytes) else x for n, x in state.items()}


def _arrays(state):
    return {n: bytes.fromhex(x) if n == "arrays" else x for n, x in state.items()}


def test_prompts_pass_in_epochs_of_keyed_orders():
    def numbers(shuffles):
        settings = Grpo(
            num_generations=4, max_completion_length=2, shuffle_dataset=shuffles
        )
        seen = []

        def keep(number, **_):
            seen.extend(number[::4])
            return range(8)

        iterator = iter(rollouts(settings, rewards=keep).of(Drawing()))
        for _ in range(8):
            next(iterator)
        return seen[:8], seen[8:]

    assert numbers(False) == ([*range(8)],) * 2
    first, second = numbers(True)
    assert sorted(first) == sorted(second) == [*range(8)] and first != second
    assert numbers(True) == (first, second)


def test_what_does_not_go_together_is_refused_by_name():
    few = {"num_generations": 4, "max_completion_length": 6}
    long = Prompt(np.ones(20, np.int32), "long", {}, "line 3 of prompts.jsonl")
    mistakes = {
        "line 3.*20 tokens.*= 6 they are more than the 25.*sequence_length": (
            lambda: rollouts(Grpo(**few), given=[long])
        ),
        "8 completions.*no groups of 3": (
            lambda: rollouts(Grpo(**few | {"num_generations": 3}))
        ),
        "12 completions.*no multiple of the 8": (
            lambda: rollouts(Grpo(**few, generation_batch_size=12))
        ),
        "no prompt": lambda: rollouts(Grpo(**few), given=[]),
        "beta is 0.1.*no reference": (
            lambda: rollouts(Grpo(**few, beta=0.1)).of(Drawing())
        ),
        "greater than or equal to 2": lambda: Grpo(num_generations=1),
        "steps_per_generation. Remove one": (
            lambda: Grpo(steps_per_generation=2, generation_batch_size=16)
        ),
        "moves a reference, and there is none": lambda: Grpo(sync_ref_model=True),
        "has no effect: it is for a teacher": lambda: Grpo(kl_penalty_coef=2.0),
        "vespo reads the corrections of tokens": lambda: Grpo(loss_type="vespo"),
        "sapo_temperature_pos: has no effect": lambda: Grpo(sapo_temperature_pos=2.0),
        "epsilon: has no effect": lambda: Grpo(loss_type="sapo", epsilon=0.1),
        "loss_type: has no effect": lambda: Grpo(algorithm="rloo", loss_type="grpo"),
        "cap: has no effect": lambda: Grpo(
            importance_sampling_correction=False, importance_sampling_cap=2.0
        ),
        "importance_sampling_level: has no effect": lambda: Grpo(
            loss_type="vespo",
            importance_sampling_level="sequence",
            importance_sampling_correction=False,
        ),
        "reward_weights: has 2 numbers": (
            lambda: Grpo(rewards=("a.py:b",), reward_weights=(1.0, 2.0))
        ),
    }
    for text, mistake in mistakes.items():
        with pytest.raises(ValueError, match=text):
            mistake()


SHAPE = GPTConfig(num_layers=2, num_heads=2, embed_dim=64, vocab_size=28, max_length=32)


def config_on(tier, folder):
    name = {"device": "none", "host": "cpu"}.get(tier, tier)
    return streamed(name, folder / "nvme", persistence_threshold=0)


def train(
    settings,
    steps,
    *,
    config=None,
    shape=SHAPE,
    checkpoints=None,
    tell=None,
    **named,
):
    """The metrics of each step of a run of zinf's own GPT.

    `tell` gets those of each step when it has ended.
    """
    policy = policy_loss(settings)

    def loss(model, batch):
        scored = {"tokens": batch["tokens"]}
        logps = model.token_scores(scored, temperature=settings.temperature)
        return policy(logps, batch)

    named = {"batch_size": 32, "given": prompts(64), "tokens_name": "tokens"} | named
    data = rollouts(settings, **named)
    count = data.num_microbatches
    sizes = {"train_batch_size": 32, "gradient_accumulation_steps": count}
    found = []
    engine = zinf.nnx.initialize(
        loss,
        lambda: GPT(shape, rngs=nnx.Rngs(0)),
        optax.adamw(3e-3, b2=0.95),
        {**sizes, "gradient_clipping": 1.0, **(config or {})},
        has_aux=True,
        batch=data.spec(),
    )
    with engine:
        tell = tell or (lambda metrics: found.append(dict(metrics)))
        hooks = [data.of(engine).hook, zinf.Hook(tell)]
        zinf.Trainer(
            engine,
            data,
            steps=steps,
            hooks=hooks,
            checkpoints=checkpoints,
            checkpoint_every=None if checkpoints is None else 1,
        ).run()
    return found


NUMBERS = ("loss", "grad_norm", "reward", "reward_std", "completions/mean_length")


def numbers(run):
    return [[m.get(name) for name in NUMBERS] for m in run]


DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.mark.slow
def test_a_model_learns_what_is_rewarded():
    settings = Grpo(num_generations=8, max_completion_length=16, epsilon_high=0.28)
    run = train(settings, 40)
    rewards = [m["reward"] for m in run]
    # Chance is one letter of 28.
    assert rewards[0] < 0.1 and max(rewards) > 0.9, rewards
    # Two executables score the same tokens: float32 log-probabilities near -3.
    assert max(m[DIFFERENCE] for m in run) < 2e-5


@pytest.mark.slow
def test_rewards_and_losses_are_equal_wherever_arrays_rest(tmp_path):
    settings = Grpo(num_generations=8, max_completion_length=8)
    runs = {
        tier: train(settings, 3, config=config_on(tier, tmp_path))
        for tier in ("device", "host", "nvme")
    }
    assert numbers(runs["device"]) == numbers(runs["host"]) == numbers(runs["nvme"])
    # In four microbatches the same texts are drawn; sums are in another order.
    several = train(
        settings, 3, config=config_on("device", tmp_path), num_microbatches=4
    )
    np.testing.assert_allclose(
        numbers(several), numbers(runs["device"]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_four_devices_learn_what_one_does():
    settings = Grpo(num_generations=8, max_completion_length=8)
    one, four = (
        train(settings, 2, config=config)
        for config in ({}, {"mesh": {"fsdp": 4}, "zero_optimization": {"stage": 3}})
    )
    # The same texts are drawn; sums are in another order.
    np.testing.assert_allclose(numbers(four), numbers(one), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 3}]
)
def test_the_sampler_and_the_trainer_agree_on_each_token(changes):
    """Log-probabilities are tempered, and of all tokens, on both sides."""
    settings = Grpo(num_generations=8, max_completion_length=8, **changes)
    (step,) = train(settings, 1)
    # Of a model at its beginning log-probabilities are near log 28.
    assert step[DIFFERENCE] < 2e-5
    assert step["clip_ratio/region_mean"] == 0


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    """Each life but the last of `killed.py` ends at another instant."""
    command = [sys.executable, "-m", "tests.unit.rollouts.killed", str(tmp_path)]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    whole, lives = found["whole"], found["killed"]
    *killed, last = lives["ended"].values()
    assert killed == [-signal.SIGKILL] * 5 and last == 0, ran.stderr
    # Steps that lives repeat say the same, to the bit.
    by_step = {step: numbers for step, *numbers in whole["seen"]}
    assert [*by_step] == [1, 2, 3, 4, 5, 6]
    for step, *numbers in lives["seen"]:
        assert numbers == by_step[step]
    assert {step for step, *_ in lives["seen"]} == {*by_step}
    texts = [tmp_path / name / "completions.jsonl" for name in found]
    assert texts[0].read_text() == texts[1].read_text()


@pytest.mark.slow
def test_a_run_goes_on_bit_equal_from_each_of_its_steps(tmp_path):
    settings = Grpo(
        num_generations=8,
        max_completion_length=6,
        num_iterations=2,
        steps_per_generation=2,
    )
    texts = tmp_path / "completions.jsonl"

    def run(folder, steps):
        with Checkpoints(folder, keep=9) as checkpoints:
            return train(settings, steps, checkpoints=checkpoints, texts=texts)

    whole = run(tmp_path / "whole", 6)
    lines = texts.read_text()
    assert len(lines.splitlines()) == 2 * 64
    for step in (2, 4, 5):
        folder = tmp_path / f"from_{step}"
        folder.mkdir()
        for part in (tmp_path / "whole").iterdir():
            if part.is_file() or (part.name.isdigit() and int(part.name) <= step):
                copy = shutil.copy if part.is_file() else shutil.copytree
                copy(part, folder / part.name)
        assert numbers(run(folder, 6)) == numbers(whole)[step:]
        # The texts of steps that are repeated are written once.
        assert texts.read_text() == lines
