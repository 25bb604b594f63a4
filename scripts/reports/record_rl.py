"""Records what TRL and DeepSpeed-Chat compute from rewards, as a fixture for tests.

    python scripts/reports/record_rl.py PPO_TRAINER TRL_CORE [OUT]

Needs torch and TRL (1.16.0 was recorded). PPO_TRAINER is DeepSpeedExamples'
`applications/DeepSpeed-Chat/dschat/rlhf/ppo_trainer.py` (at 45b4b71), which runs with
the modules that it imports replaced by empty ones. TRL_CORE is `trl/core.py` of TRL
0.19.1, which still had a `PPOTrainer`; only its functions of masked means run. OUT is
`tests/unit/rl/originals.npz` unless given.

Losses are TRL's own `_compute_loss`, with the log-probabilities of a model replaced by
given ones. Advantages and importance ratios are computed in the middle of a long method
of TRL, of which the lines alone are executed. All is computed in float64 from numbers
that float32 has, and recorded in float32. Losses of a step are sums over microbatches.
"""

import ast
import importlib.util
import inspect
import math
import sys
import textwrap
import types
from collections import defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import nanstd

ROWS, TOKENS, GROUP = 8, 5, 4
MAX_LENGTH = 7
# Rows of a microbatch, and microbatches of a step.
SPLIT = {"whole": (8, 1), "split": (2, 2)}
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
VARIANTS = {
    "plain": {},
    "on_policy": {"old": False},
    "higher": {"epsilon_high": 0.28},
    "two_sided": {"epsilon_high": 0.28, "delta": 1.4},
    "kl": {"beta": 0.04},
    "kl_corrected": {"beta": 0.04, "use_bias_correction_kl": True},
    "token_ratio": {"beta": 0.04, "ratio": "token"},
    "sequence_ratio": {"beta": 0.04, "ratio": "sequence"},
    "entropy": {"beta": 0.04, "top_entropy_quantile": 0.4},
}
METRICS = (
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
    "vespo/phi_seq_mean",
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DEFAULT_OUT = Path(__file__).parents[2] / "tests/unit/rl/originals.npz"


class _Absent(types.ModuleType):
    """Any name in it is another such module."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)


def exact(values: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of float32, in float64."""
    return values.float().double()


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return exact(torch.randn(*shape, generator=generator))


def whole(x):
    return x


# One process: what is gathered is there.
ACCELERATOR = SimpleNamespace(
    gather=whole,
    gather_for_metrics=whole,
    reduce=lambda x, reduction: x,
    pad_across_processes=lambda x, dim, pad_index: x,
    num_processes=1,
)


def lines_of(function, first: str, last: str):
    """The lines of a function from one that begins so to the one before another."""
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(function))).splitlines()
    (start, *_) = (i for i, x in enumerate(lines) if x.strip().startswith(first))
    (stop, *_) = (
        i for i, x in enumerate(lines) if x.strip().startswith(last) and i > start
    )
    code = textwrap.dedent("\n".join(lines[start:stop]))
    return compile(code, inspect.getsourcefile(function), "exec")


def trainer_of(kind, logps, entropies, **settings):
    """What `_compute_loss` reads of a trainer."""
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        off_policy_mask_threshold=None,
        use_vllm=True,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        **settings,
    )
    if kind is GRPOTrainer:
        for name in ("get_gamma_weights", "get_off_policy_mask"):
            setattr(trainer, name, getattr(kind, name))
        trainer.get_high_entropy_mask = kind.get_high_entropy_mask.__get__(trainer)
    return trainer


def losses_of(data, loss_type: str, level: str, variant: dict, split: str):
    """Losses of steps, the gradient of their sum, metrics of the last microbatch."""
    rows, accumulated = SPLIT[split]
    count = ROWS // rows
    logps = data["logps"].clone().requires_grad_()
    epsilon_high = variant.get("epsilon_high", 0.2)
    args = SimpleNamespace(
        delta=variant.get("delta"),
        use_bias_correction_kl=variant.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=count,
    )
    losses = np.zeros(count // accumulated)
    metrics = {}
    for number in range(count):
        part = slice(number * rows, (number + 1) * rows)
        trainer = trainer_of(
            GRPOTrainer,
            logps[part],
            data["entropies"][part],
            args=args,
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_low=0.2,
            epsilon_high=epsilon_high,
            beta=variant.get("beta", 0.0),
            top_entropy_quantile=variant.get("top_entropy_quantile", 1.0),
            vllm_importance_sampling_correction="ratio" in variant,
            current_gradient_accumulation_steps=accumulated,
            max_completion_length=MAX_LENGTH,
        )
        inputs = {
            "prompt_ids": torch.zeros(rows, 1),
            "prompt_mask": torch.ones(rows, 1),
            "completion_ids": torch.zeros(rows, TOKENS),
            "completion_mask": data["completion_mask"][part],
            "tool_mask": data["tool_mask"][part],
            "advantages": data["advantages"][part],
            "ref_per_token_logps": data["ref_logps"][part],
            "num_items_in_batch": data["mask"].sum(),
        }
        if variant.get("old", True):
            inputs["old_per_token_logps"] = data["old_logps"][part]
        if "ratio" in variant:
            inputs["importance_sampling_ratio"] = data[f"{variant['ratio']}_ratio"][
                part
            ]
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        losses[number // accumulated] += loss.item()
        metrics = {n: x[0] for n, x in trainer._metrics["train"].items()}
    row = [metrics.get(name, math.nan) for name in METRICS]
    return losses, logps.grad.numpy(), np.array(row)


def record_losses(data, record: dict) -> None:
    found = {}
    for loss_type, level, name in product(LOSS_TYPES, ("token", "sequence"), VARIANTS):
        variant = VARIANTS[name]
        if loss_type == "vespo" and (level, variant.get("ratio")) not in (
            ("token", None),
            ("token", "token"),
        ):
            continue
        # TRL takes the tokens, and the quantile of entropies, of a microbatch.
        is_whole = loss_type == "bnpo" or name == "entropy"
        for split in ("whole",) if is_whole else SPLIT:
            case = f"{loss_type}/{level}/{name}/{split}"
            found[case] = losses_of(data, loss_type, level, variant, split)
    record["cases"] = np.array([*found])
    for number, name in enumerate(("losses", "grads", "metrics")):
        rows = [x[number] for x in found.values()]
        width = max(len(row) for row in rows)
        padded = [
            np.pad(x, [(0, width - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in rows
        ]
        record[name] = np.stack(padded)
    record["metric_names"] = np.array(METRICS)


def record_rloo(data, record: dict) -> None:
    """RLOO has no masks of tools, and counts a row without tokens; here is none."""
    mask = data["completion_mask"].clone()
    mask[:, 0] = 1
    logps = data["logps"].clone().requires_grad_()
    trainer = trainer_of(
        RLOOTrainer, logps, data["entropies"], epsilon_low=0.2, epsilon_high=0.2
    )
    inputs = {
        **{name: torch.zeros(ROWS, 1) for name in ("prompt_ids", "prompt_mask")},
        "completion_ids": torch.zeros(ROWS, TOKENS),
        "completion_mask": mask,
        "advantages": data["advantages"],
        "old_logps": (data["old_logps"] * mask).sum(1),
    }
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    record |= {"rloo/mask": mask, "rloo/loss": loss.item(), "rloo/grad": logps.grad}


def record_advantages(generator, record: dict) -> None:
    """TRL's advantages of two rewards with missing ones."""
    rewards = drawn(generator, 3 * GROUP, 2)
    rewards[1, 0] = rewards[6] = math.nan  # One function left it out, and both did.
    rewards[8:11] = math.nan  # A group with one reward.
    rewards[:, 1] *= 3
    record |= {"rewards": rewards, "reward_weights": np.array([1.0, 0.5])}
    first, last = "unscorable_mask =", "# Slice to keep only the local part"
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for aggregation, scale in (
        *(("sum_then_normalize", scale) for scale in ("group", "batch", "none")),
        ("normalize_then_sum", "group"),
    ):
        names = {
            "torch": torch,
            "nanstd": nanstd,
            "device": "cpu",
            "num_generations": GROUP,
            "rewards_per_func": rewards.clone(),
            "self": SimpleNamespace(
                multi_objective_aggregation=aggregation,
                scale_rewards=scale,
                reward_weights=weights,
                reward_funcs=[None, None],
            ),
        }
        method = GRPOTrainer._generate_and_score_completions
        exec(lines_of(method, first, last), names)
        record[f"advantages/{aggregation}/{scale}"] = names["advantages"]
    logps, ref_logps, noise = drawn(generator, 3, 3 * GROUP, TOKENS)
    mask = (noise < 0.5).double()
    record |= {"kl/logps": logps, "kl/ref_logps": ref_logps, "kl/mask": mask}
    for beta, normalize in product((0.0, 0.05), (False, True)):
        names = {
            "torch": torch,
            "nanstd": nanstd,
            "device": "cpu",
            "gather": whole,
            "num_generations": GROUP,
            "rewards_per_func": rewards.clone(),
            "old_per_token_logps": logps,
            "ref_per_token_logps": ref_logps,
            "completion_mask": mask,
            "self": SimpleNamespace(
                reward_clip_range=None,
                reward_weights=weights,
                beta=beta,
                normalize_advantages=normalize,
            ),
        }
        method = RLOOTrainer._generate_and_score_completions
        exec(lines_of(method, first, last), names)
        record[f"rloo_advantages/{beta}/{normalize}"] = names["advantages"]


def record_ratios(data, record: dict) -> None:
    """TRL's importance ratios, with a log-probability that is missing."""
    code = lines_of(
        GRPOTrainer._generate_and_score_completions,
        "mask = completion_mask if tool_mask is None else",
        "# Compute the per-token log probabilities for the reference model",
    )
    for mode, floor in product(MODES, (None, 0.5)):
        names = {
            "torch": torch,
            "math": math,
            "completion_mask": data["completion_mask"],
            "tool_mask": data["tool_mask"],
            "old_per_token_logps": data["old_logps"],
            "sampling_per_token_logps": data["sampler_logps"],
            "self": SimpleNamespace(
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_min=floor,
                vllm_importance_sampling_clip_max=1.5,
            ),
        }
        exec(code, names)
        record[f"ratios/{mode}/{floor}"] = names["vllm_importance_sampling_ratio"]


def record_reward_model(generator, record: dict) -> None:
    logits = drawn(generator, 2 * ROWS, 1)
    margins = drawn(generator, ROWS).abs()
    record |= {"pairs/logits": logits, "pairs/margins": margins}
    for has_margin, coefficient in product((False, True), (None, 0.01)):
        scores = logits.clone().requires_grad_()
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=False),
            args=SimpleNamespace(center_rewards_coefficient=coefficient),
            accelerator=ACCELERATOR,
            _metrics={"eval": defaultdict(list)},
            _total_train_tokens=0,
        )
        inputs = {"margin": margins} if has_margin else {}
        outputs = SimpleNamespace(logits=scores)
        compute = inspect.unwrap(RewardTrainer.compute_loss)
        loss = compute(trainer, lambda outputs=outputs, **_: outputs, inputs)
        loss.backward()
        case = f"pairs/{has_margin}/{coefficient}"
        accuracy = trainer._metrics["eval"]["accuracy"][0]
        record |= {f"{case}/loss": loss.item(), f"{case}/grad": scores.grad}
        record["pairs/accuracy"] = np.float64(accuracy)


def deepspeed_trainer(path: Path):
    for name in (
        "deepspeed",
        "deepspeed.runtime",
        "deepspeed.runtime.zero",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.accelerator",
        "dschat",
        "dschat.utils",
        "dschat.utils.utils",
    ):
        sys.modules[name] = _Absent(name)
    spec = importlib.util.spec_from_file_location("ppo_trainer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = SimpleNamespace(
        **dict.fromkeys(("actor", "critic", "ref", "reward")),
        tokenizer=lambda _: {"input_ids": [0]},
    )
    args = SimpleNamespace(
        max_answer_seq_len=TOKENS,
        end_of_conversation_token="",
        actor_zero_stage=0,
        compute_fp32_loss=True,
    )
    return module.DeepSpeedPPOTrainer(engine, args)


def record_ppo(path: Path, generator, record: dict) -> None:
    """One step of `train_rlhf`: its lines between the models."""
    trainer = deepspeed_trainer(path)
    prompt, rows = 3, 4
    length = prompt + TOKENS
    seq = torch.zeros(rows, length)
    attention = torch.ones(rows, length, dtype=torch.long)
    for row, tokens in enumerate((5, 3, 1, 4)):
        attention[row, prompt + tokens :] = 0
    old_logps, ref_logps, logps = 0.5 * drawn(generator, 3, rows, length - 1)
    old_values, values = drawn(generator, 2, rows, length - 1)
    scores = 8 * drawn(generator, rows)
    record |= {f"ppo/{n}": x.clone() for n, x in (
        ("attention", attention), ("old_logps", old_logps), ("ref_logps", ref_logps),
        ("logps", logps), ("old_values", old_values), ("values", values),
        ("scores", scores), ("prompt", torch.tensor(prompt)),
    )}  # fmt: skip
    names = {
        "torch": torch,
        "self": trainer,
        "inputs": {
            "prompts": seq[:, :prompt],
            "logprobs": old_logps,
            "ref_logprobs": ref_logps,
            "rewards": scores,
            "value": old_values.clone(),
            "attention_mask": attention,
            "input_ids": seq,
        },
    }
    exec(lines_of(trainer.train_rlhf, "prompts = inputs", "### process the new"), names)
    start, mask = names["start"], names["action_mask"]
    names = {
        n: names[n] for n in ("old_rewards", "old_values", "advantages", "returns")
    }
    record |= {f"ppo/{n}": x for n, x in names.items()}
    logps, values = logps.requires_grad_(), values.requires_grad_()
    actor = trainer.actor_loss_fn(
        logps[:, start:], old_logps[:, start:], names["advantages"], mask[:, start:]
    )
    # DeepSpeed computes it in float32 on request; here everything is float64.
    trainer.compute_fp32_loss = False
    critic = trainer.critic_loss_fn(
        values[:, start:], names["old_values"][:, start:], names["returns"],
        mask[:, start:],
    )  # fmt: skip
    (actor + critic).backward()
    record |= {"ppo/actor": actor.item(), "ppo/critic": critic.item()}
    record |= {"ppo/actor_grad": logps.grad, "ppo/critic_grad": values.grad}


def record_whitening(path: Path, data, record: dict) -> None:
    wanted = {"masked_mean", "masked_var", "masked_whiten"}
    tree = ast.parse(path.read_text())
    tree.body = [x for x in tree.body if getattr(x, "name", "") in wanted]
    names = {"torch": torch, "Optional": "Optional"}
    future = "from __future__ import annotations\n"
    exec(compile(future + ast.unparse(tree), path, "exec"), names)
    for shift in (False, True):
        found = names["masked_whiten"](data["logps"], data["mask"], shift_mean=shift)
        record[f"whitened/{shift}"] = found


def write(out: Path, record: dict) -> None:
    """Write arrays, those of float64 in float32."""
    arrays = {name: np.asarray(x) for name, x in record.items()}
    for name, x in arrays.items():
        if x.dtype == np.float64:
            arrays[name] = x.astype(np.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    logps, old, reference, sampler, entropies, ratios = drawn(
        generator, 6, ROWS, TOKENS
    )
    logps = exact(logps / 2 - 1.5)
    data = {
        "logps": logps,
        "old_logps": exact(logps + 0.3 * old),
        "ref_logps": exact(logps + 0.4 * reference),
        "entropies": entropies.abs(),
        "advantages": drawn(generator, ROWS),
        "completion_mask": torch.ones(ROWS, TOKENS),
        "tool_mask": torch.ones(ROWS, TOKENS),
    }
    for row, length in enumerate((5, 2, 4, 0, 1, 3, 5, 2)):
        data["completion_mask"][row, length:] = 0
    data["tool_mask"][2, 1:3] = data["tool_mask"][6, 0] = 0
    data["mask"] = data["completion_mask"] * data["tool_mask"]
    data["sampler_logps"] = exact(data["old_logps"] + 0.3 * sampler)
    data["sampler_logps"][0, 1] = math.nan
    data["token_ratio"] = exact(torch.exp(ratios / 4 * data["mask"]))
    data["sequence_ratio"] = exact(torch.exp(ratios[:, :1] / 4))
    record = {name: x.clone() for name, x in data.items()}
    record_losses(data, record)
    record_rloo(data, record)
    record_advantages(generator, record)
    record_ratios(data, record)
    record_reward_model(generator, record)
    record_ppo(Path(sys.argv[1]), generator, record)
    record_whitening(Path(sys.argv[2]), data, record)
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_OUT
    write(out, record)
    print(f"{len(record)} arrays of {len(record['cases'])} losses in {out}")


if __name__ == "__main__":
    main()
