"""Options of commands that set keys of a config, each declared once, in `FINETUNE`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from zinf.cli.arguments import TooLong
from zinf.core.objectives import FINETUNED, in_help


@dataclass(frozen=True)
class Option:
    """An option that sets a key of the config; absent, it sets nothing.

    Attributes:
        key: path of the key, with dots.
        kind: type of its value. A bool is a flag, with a `--no-` if its default is on.
        help: what `--help` says.
        default: the value that sets nothing.
        more: arguments of `typer.Option`.
    """

    key: str
    kind: Any
    help: str
    default: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def parameter(self, name: str) -> Parameter:
        """The option as a parameter of a command."""
        dashed = name.replace("_", "-")
        names = {False: [f"--{dashed}"], True: [f"--{dashed}/--no-{dashed}"]}
        flag = names[self.default] if self.kind is bool else ()
        option = typer.Option(*flag, help=self.help, **self.more)
        kind = self.kind if self.default is not None else self.kind | None
        annotation, default = Annotated[kind, option], self.default
        named = {"default": default, "annotation": annotation}
        return Parameter(name, Parameter.KEYWORD_ONLY, **named)


_RATE = (
    "Of AdamW, at most: after 3% of warm-up (none in one or two steps) it falls to "
    "zero, as the linear schedule of transformers does. "
)
_LOW = ", ".join(name for name, x in FINETUNED.items() if x.rate < 1)
FINETUNE = {
    "steps": Option(
        "run.steps", int, "Optimizer steps, in place of --epochs.", more={"min": 1}
    ),
    "learning_rate": Option(
        "optimizer.params.lr",
        float,
        f"{_RATE}1e-5 if absent, 2e-4 with adapters, a tenth for {_LOW}.",
    ),
    "sequence_length": Option(
        "data.sequence_length",
        int,
        "Most tokens of a sample; if absent, 1024, or what the model was made for if "
        "that is less.",
        more={"min": 2},
    ),
    "eval_data": Option(
        "data.evaluation_paths",
        list[Path],
        "Files like --data for evaluation; repeatable.",
    ),
    "completion_only_loss": Option(
        "data.completion_only",
        bool,
        "Train on completions and answers; else on prompts too.",
        default=True,
    ),
    "assistant_only_loss": Option(
        "data.assistant_only",
        bool,
        "Train on all that the assistant says, as the chat template marks it.",
        default=False,
    ),
    "objective": Option("data.objective", str, f"{in_help()}.", default="sft"),
    "beta": Option(
        "data.beta",
        float,
        "Of dpo, ipo and kto: how much the model is kept as it was. Of simpo and orpo: "
        "a factor of preferences. 0.1 if absent.",
    ),
    "teacher": Option(
        "distillation.teacher",
        str,
        "A model, as a folder or a name, whose predictions the model learns too.",
    ),
    "packing": Option(
        "data.packing", bool, "Put several samples into one row.", default=False
    ),
    "too_long": Option(
        "data.too_long",
        TooLong,
        "Samples of more tokens: error (if absent) ends the run, truncate cuts them, "
        "drop leaves them out.",
    ),
    "freeze_vision_tower": Option(
        "model.freeze_vision_tower",
        bool,
        "Leave the part that reads images as it is, also without adapters.",
        default=False,
    ),
    "multimodal_attention": Option(
        "model.multimodal_attention",
        bool,
        "Text sees images by a softmax of its own, and they see themselves alone "
        "(DeepSpeed-VisualChat).",
        default=False,
    ),
    "nvme": Option(
        "memory.nvme", Path, "Folder on a drive, for state that memory has no room for."
    ),
    "lora": Option(
        "adapter.r",
        int,
        "Train adapters of this rank, such as 16.",
        more={"min": 1, "metavar": "RANK"},
    ),
    "lora_alpha": Option(
        "adapter.lora_alpha",
        float,
        "Adapters are scaled by this over the rank; twice the rank if absent.",
    ),
    "lora_dropout": Option(
        "adapter.lora_dropout", float, "Share of an adapter's inputs to drop."
    ),
    "target_modules": Option(
        "adapter.target_modules",
        list[str],
        "Weights with adapters, such as q_proj; repeatable. All linear layers if "
        "absent.",
    ),
    "modules_to_save": Option(
        "adapter.modules_to_save",
        list[str],
        "Parameters to train whole beside adapters; repeatable.",
    ),
    "use_rslora": Option(
        "adapter.use_rslora", bool, "Scale by the root of the rank.", default=False
    ),
    "use_dora": Option(
        "adapter.use_dora", bool, "Train lengths of columns apart.", default=False
    ),
    "base_encoding": Option(
        "adapter.quantize_base",
        str,
        "Keep frozen weights in blocks: int8 or nf4 (QLoRA).",
    ),
    "adapter": Option(
        "adapter.begin_from",
        Path,
        "Folder of a saved adapter to begin from; needs --lora.",
    ),
    "resume": Option(
        "run.resume", bool, "Continue from the newest checkpoint.", default=False
    ),
    "push_to_hub": Option(
        "run.push_to_hub",
        bool,
        "Upload OUTPUT to the Hugging Face hub at last.",
        default=False,
    ),
    "hub_model_id": Option(
        "run.hub_model_id",
        str,
        "Repository of the upload, OWNER/NAME or NAME; the name of OUTPUT if absent.",
    ),
    "hub_private_repo": Option(
        "run.hub_private_repo", bool, "Make it a private one.", default=False
    ),
}

_OF_DRAWN = (
    *("steps", "sequence_length", "too_long", "nvme", "lora"),
    *("lora_alpha", "lora_dropout", "target_modules", "modules_to_save"),
    *("use_rslora", "use_dora", "base_encoding", "adapter", "resume"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
)
GRPO = {name: FINETUNE[name] for name in _OF_DRAWN} | {
    "learning_rate": Option(
        "optimizer.params.lr",
        float,
        f"{_RATE}1e-6 if absent, 2e-5 with adapters.",
    ),
    "algorithm": Option("grpo.algorithm", str, "grpo or rloo.", default="grpo"),
    "num_generations": Option(
        "grpo.num_generations", int, "Completions of a prompt; 8 if absent."
    ),
    "max_completion_length": Option(
        "grpo.max_completion_length", int, "Most tokens of one; 256 if absent."
    ),
    "temperature": Option(
        "grpo.temperature", float, "Of drawing and of the loss; 1 if absent."
    ),
    "top_p": Option("grpo.top_p", float, "Draw from the likeliest of this sum."),
    "top_k": Option("grpo.top_k", int, "Draw from so many of the likeliest."),
    "min_p": Option("grpo.min_p", float, "Draw from this share of the likeliest."),
    "beta": Option(
        "grpo.beta",
        float,
        "Factor of the divergence from the model as it was; 0, no reference, if "
        "absent.",
    ),
    "loss_type": Option(
        "grpo.loss_type",
        str,
        "dapo (if absent), grpo, bnpo, dr_grpo, cispo, sapo, luspo or vespo.",
    ),
    "scale_rewards": Option(
        "grpo.scale_rewards", str, "Of advantages: group (if absent), batch or none."
    ),
    "importance_sampling_level": Option(
        "grpo.importance_sampling_level",
        str,
        "Ratios of a token (if absent), sequence or sequence_token.",
    ),
    "epsilon": Option("grpo.epsilon", float, "Clip ratios; 0.2 if absent."),
    "epsilon_high": Option("grpo.epsilon_high", float, "Above; epsilon if absent."),
    "num_iterations": Option(
        "grpo.num_iterations", int, "Times that a completion is trained on."
    ),
    "steps_per_generation": Option(
        "grpo.steps_per_generation", int, "Microbatches of what is drawn at once."
    ),
    "mask_truncated_completions": Option(
        "grpo.mask_truncated_completions",
        bool,
        "Leave out completions that did not end.",
        default=False,
    ),
    "teacher": Option(
        "grpo.teacher",
        str,
        "Model to learn from by its log-probabilities of what is written, a folder or "
        "a name (on-policy distillation); --reward may then be absent.",
    ),
    "kl_penalty_coef": Option(
        "grpo.kl_penalty_coef", float, "Factor of the teacher's part; 1 if absent."
    ),
    "environment": Option(
        "grpo.environment",
        str,
        "FILE.py:FUNCTION of (prompts, completions, **columns), which replies to each "
        "turn of the model, or returns None for those that end.",
    ),
    "reward_weights": Option(
        "grpo.reward_weights", list[float], "A factor a reward; repeatable."
    ),
}

PPO = {name: FINETUNE[name] for name in _OF_DRAWN if name != "adapter"} | {
    "learning_rate": Option(
        "optimizer.params.lr",
        float,
        f"{_RATE}3e-6 if absent, 6e-5 with adapters.",
    ),
    "critic": Option(
        "ppo.critic",
        str,
        "Model that the critic begins from, a folder or a name; if absent the reward "
        "model, if there is one alone, else MODEL.",
    ),
    "response_length": Option(
        "ppo.response_length", int, "Most tokens of a completion; 53 if absent."
    ),
    "temperature": Option(
        "ppo.temperature", float, "Of drawing and of the loss; 0.7 if absent."
    ),
    "top_p": Option("ppo.top_p", float, "Draw from the likeliest of this sum."),
    "top_k": Option("ppo.top_k", int, "Draw from so many of the likeliest."),
    "kl_coef": Option(
        "ppo.kl_coef",
        float,
        "Factor of the divergence from the model as it was; 0.05 if absent; 0: no "
        "reference.",
    ),
    "kl_estimator": Option("ppo.kl_estimator", str, "k1 (if absent) or k3."),
    "cliprange": Option("ppo.cliprange", float, "Clip ratios; 0.2 if absent."),
    "vf_coef": Option(
        "ppo.vf_coef", float, "Factor of the critic's loss; 0.1 if absent."
    ),
    "cliprange_value": Option(
        "ppo.cliprange_value", float, "Clip values; 0.2 if absent."
    ),
    "gamma": Option("ppo.gamma", float, "Discount of later rewards; 1 if absent."),
    "lam": Option("ppo.lam", float, "Trust in later values; 0.95 if absent."),
    "num_ppo_epochs": Option(
        "ppo.num_ppo_epochs", int, "Times a completion is trained on; 4 if absent."
    ),
    "num_mini_batches": Option(
        "ppo.num_mini_batches", int, "Batches of what is drawn at once; 1 if absent."
    ),
    "whiten_rewards": Option(
        "ppo.whiten_rewards", bool, "Scale rewards of tokens.", default=False
    ),
    "missing_eos_penalty": Option(
        "ppo.missing_eos_penalty", float, "Subtracted where a completion did not end."
    ),
    "reward_weights": Option(
        "ppo.reward_weights", list[float], "A factor a reward; repeatable."
    ),
}
# The options of commands whose data the model draws, by their objective.
DRAWN = {"grpo": GRPO, "ppo": PPO}


def with_options(options: Mapping[str, Option]) -> Callable[[Callable], Callable]:
    """Gives a command options in place of its `**options`."""

    def decorate(command: Callable) -> Callable:
        described: Any = command
        *own, _ = signature(command).parameters.values()
        added = [option.parameter(name) for name, option in options.items()]
        described.__signature__ = signature(command).replace(parameters=own + added)
        return command

    return decorate


def keys_of(
    options: Mapping[str, Option], values: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The keys that values of options set, with what JSON and YAML have for these."""
    for name, option in options.items():
        value = values.get(name)
        if value is None or value == [] or value == option.default:
            continue
        if isinstance(value, list | tuple):
            value = [str(x) if isinstance(x, Path) else x for x in value]
        yield option.key, str(value) if isinstance(value, Path) else value
