"""Options of `zinf finetune`, `grpo` and `ppo` by names of TRL's scripts and axolotl.

They are of TRL 0.24's `SFTConfig`, `DPOConfig`, `GRPOConfig`, `PPOConfig`,
`ModelConfig` and `ScriptArguments`, of `transformers.TrainingArguments`, and of the
keys of axolotl's configs. They are written with dashes or underscores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand

from zinf.core.objectives import FINETUNED
from zinf.core.text.complaint import complain

# axolotl's names, and TRL's for the same.
AXOLOTL = {
    "base-model": "model-name-or-path",
    "micro-batch-size": "per-device-train-batch-size",
    "num-epochs": "num-train-epochs",
    "lr-scheduler": "lr-scheduler-type",
    "optimizer": "optim",
    "sequence-len": "max-length",
    "sample-packing": "packing",
    "excess-length-strategy": "too-long",
}
# Options of zinf under another name.
RENAMED = {
    "output-dir": "output",
    "num-train-epochs": "epochs",
    "max-steps": "steps",
    "max-length": "sequence-length",
    "max-seq-length": "sequence-length",
    "lora-r": "lora",
    "lora-target-modules": "target-modules",
    "lora-modules-to-save": "modules-to-save",
    "reward-funcs": "reward",
    "reward-model-path": "reward",
}
# Keys of the config.
KEYS = {
    "weight-decay": "optimizer.params.weight_decay",
    "adam-epsilon": "optimizer.params.eps",
    "max-grad-norm": "gradient_clipping",
    "save-steps": "run.checkpoint_every",
    "save-total-limit": "run.keep_checkpoints",
    "logging-steps": "run.log_every",
    "seed": "run.seed",
    "val-set-size": "data.validation_fraction",
    "center-rewards-coefficient": "data.center_rewards_coefficient",
    "desirable-weight": "data.desirable_weight",
    "undesirable-weight": "data.undesirable_weight",
}
# Keys of the config of commands whose data the model draws, by an option that the
# command has alone.
OF_DRAWN = {
    "--num-generations": (
        "grpo",
        *("generation_batch_size", "shuffle_dataset", "repetition_penalty", "delta"),
        *("top_entropy_quantile", "use_bias_correction_kl", "reward_timeout"),
        *("sapo_temperature_neg", "sapo_temperature_pos", "sync_ref_model"),
        *("ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("environment_timeout", "max_tool_calling_iterations"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
    "--num-ppo-epochs": (
        "ppo",
        *("shuffle_dataset", "repetition_penalty", "reward_timeout"),
    ),
}
# Options that have no effect, as zinf has its own way. The run goes on.
OTHERWISE = {
    "gradient-checkpointing": "the plan says what is recomputed, by the budgets",
    "gradient-checkpointing-kwargs": "the plan says what is recomputed",
    "attn-implementation": "model.attention (--set) says how, and the plan which",
    "dtype": "masters are in float32, and bf16 says what is computed in",
    "torch-dtype": "masters are in float32, and bf16 says what is computed in",
    "dataset-num-proc": "files are read and tokenized by part",
    "dataloader-num-workers": "samples are read ahead of the step",
    "use-liger-kernel": "the loss is computed by tile where logits are large",
    "padding-free": "rows are padded to few lengths; --packing fills them",
    "remove-unused-columns": "columns without a meaning are left out",
    "no-remove-unused-columns": "columns without a meaning are left out",
    "use-cache": "training keeps no cache",
    "logging-first-step": "metrics.jsonl has a line for each step",
    "flash-attention": "model.attention (--set) says how, and the plan which",
    "lora-target-linear": "it is so without the option",
    "pad-to-sequence-len": "rows are padded to few lengths",
    "evals-per-epoch": "evaluations are every --eval-steps, with --eval-data",
    "saves-per-epoch": "checkpoints are every --save-steps, and at the end",
    "ddp-timeout": "it is of torch.distributed",
    "tf32": "float32 products are in full precision",
    "eval-strategy": "evaluations are every --eval-steps, with --eval-data",
    "save-strategy": "checkpoints are every --save-steps, and at the end",
    "logging-strategy": "metrics.jsonl has a line for each step",
    "use-vllm": "completions are drawn by the engine that trains",
    "vllm-mode": "completions are drawn by the engine that trains",
    "vllm-gpu-memory-utilization": "the plan says what rests on the device",
    "log-completions": "OUTPUT.run/completions.jsonl has all of them",
    "num-completions-to-print": "OUTPUT.run/completions.jsonl has all of them",
    "ds3-gather-for-generation": "weights are streamed as in training",
    "num-sample-generations": "OUTPUT.run/completions.jsonl has all of them",
    "local-rollout-forward-batch-size": "the plan says how many rows run at once",
    "stop-token": "completions end with the tokens that end texts of the model",
}
# Options that are refused: without them the run would be another one.
REFUSED = {
    "dataset-name": "zinf finetune reads files. Download the data set, such as by `hf "
    "download --repo-type dataset NAME`, and name its files: --data FILE.",
    "dataset-config": "zinf finetune reads files: --data FILE.",
    "dataset-text-field": "Texts are in `text`: rename the field.",
    "chat-template": "Put the template beside the model, as chat_template.jinja.",
    "chat-template-path": "Put the template beside the model, as chat_template.jinja.",
    "eos-token": "Set eos_token in tokenizer_config.json, beside the model.",
    "neftune-noise-alpha": "zinf adds no noise to embeddings.",
    "label-smoothing-factor": "zinf has no label smoothing.",
    "eval-packing": "Evaluations are packed as training is.",
    "deepspeed": "Name the file as the config of zinf train.",
    "fsdp": "zinf train CONFIG divides state: zero_optimization.stage, mesh.",
    "metric-for-best-model": "The best checkpoint (run.keep_best) goes by the loss.",
    "group-by-length": "Use data_efficiency's dynamic_batching (--set).",
    "auto-find-batch-size": "zinf plan --model says what fits, before the run.",
    "datasets": "Name files, and their format is found: --data FILE.",
    "rl": "grpo and ppo are the commands zinf grpo and zinf ppo; else the objective "
    "says which: --objective "
    f"({', '.join(FINETUNED)}).",
    "wandb-project": "zinf writes metrics.jsonl, and TensorBoard's events: --report-to "
    "tensorboard.",
    "special-tokens": "Set them in tokenizer_config.json, beside the model.",
    "ref-model": "The reference is the model as it was.",
    "max-prompt-length": "Prompts are not cut: --too-long drop leaves out those that "
    "have no room for a completion beside them.",
    "precompute-ref-log-probs": "zinf always does so: leave it out.",
}
# TRL's and transformers' defaults, where one of several options is given.
ROWS_PER_DEVICE = 8
RANK = 16
SCHEDULES = ("linear", "cosine", "constant_with_warmup")
# Names of AdamW, and how its moments are kept. Where they rest is in the plan.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "float32"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "float32"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "8bit"),
}
# The losses of TRL's `DPOTrainer` that zinf has, and the objective of each.
LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
# Values of axolotl's `adapter`, and what TRL's users ask for with each.
ADAPTERS = {"lora": ("use-peft",), "qlora": ("use-peft", "load-in-4bit")}
# Options that TRL gives several words, and zinf one each time.
SEVERAL = {"target-modules", "modules-to-save", "reward", "reward-weights"}
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


class FamiliarCommand(TyperCommand):
    """A command that takes the options of TRL's scripts too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            given = translated(args, own_options(self), say=complain)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx) from None
        return super().parse_args(ctx, given)


def own_options(command: Any) -> dict[str, bool]:
    """The options of a command, each with whether it is a flag."""
    return {
        name: getattr(p, "is_flag", False)
        for p in command.params
        for name in (*p.opts, *p.secondary_opts)
    }


def keys_of_drawn(own: Mapping[str, bool]) -> dict[str, str]:
    """Keys that a command sets by options of TRL which it does not have itself.

    Args:
        own: see `translated`.
    """
    for option, (section, *names) in OF_DRAWN.items():
        if option in own:
            return {name.replace("_", "-"): f"{section}.{name}" for name in names}
    return {}


def translated(
    args: Sequence[str], own: Mapping[str, bool], *, say: Callable[[str], None]
) -> list[str]:
    """The arguments with TRL's options as zinf's.

    Args:
        args: what is behind `zinf finetune`, `zinf grpo` or `zinf ppo`.
        own: the options that zinf has, such as "--data", and whether they are flags.
        say: told of options that have no effect.

    Raises:
        ValueError: an option asks for what zinf does not do, or two for one thing.
    """
    options = _Options(own, say)
    for name, values in _options(args):
        options.add(name, values)
    return options.ended()


def _options(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words up to the next one; "" for those before the first."""
    name, values = "", list[str]()
    for word in args:
        if not word.startswith("--") or word == "--":
            values.append(word)
            continue
        yield name, values
        name, equals, value = word.partition("=")
        values = [value] if equals else []
    yield name, values


@dataclass
class _Options:
    """The arguments of zinf that the arguments given so far translate to.

    Attributes:
        done: arguments of zinf.
        kept: options that several of zinf's follow from together, by name.
    """

    own: Mapping[str, bool]
    say: Callable[[str], None]
    done: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def add(self, option: str, values: list[str]) -> None:
        name = option.removeprefix("--").replace("_", "-")
        if name in AXOLOTL and option not in self.own:
            name = AXOLOTL[name]
        new = RENAMED.get(name, name)
        if name == "adapter" and values[:1] and values[0] in ADAPTERS:
            # --adapter of zinf is a folder: ./lora
            self.kept |= dict.fromkeys(ADAPTERS[values[0]], "true")
            self.done += values[1:]
        elif f"--{new}" in self.own or not option:
            self._add_own(new if option else "", values)
        elif name in KEYS:
            self.set(KEYS[name], *values)
        elif name in (keys := keys_of_drawn(self.own)):
            self.set(keys[name], *values)
        elif name in OTHERWISE:
            self.say(f"--{name}: has no effect: {OTHERWISE[name]}.")
        elif name in REFUSED:
            raise ValueError(f"--{name}: {REFUSED[name]}")
        elif name in KEPT:
            self.kept[name] = values[0] if values else "true"
            self.done += values[1:]
        else:
            self.done += [option, *values]

    def _add_own(self, name: str, values: list[str]) -> None:
        if not name:
            self.done += values
        elif self.own[f"--{name}"]:
            word = values[0].lower() if values else "true"
            if word in FALSE:
                is_on, values = False, values[1:]
            else:
                is_on, values = True, values[word in TRUE and bool(values) :]
            off = f"--no-{name}"
            if is_on:
                self.done.append(f"--{name}")
            elif off in self.own:
                self.done.append(off)
            self.done += values
        elif name == "target-modules" and values == ["all-linear"]:
            return  # As without the option.
        elif len(values) > 1 and name in SEVERAL:
            self.done += [word for value in values for word in (f"--{name}", value)]
        else:
            self.done += [f"--{name}", *values]

    def set(self, key: str, *values: str) -> None:
        self.done += ["--set", f"{key}={values[0] if values else 'true'}", *values[1:]]

    def ended(self) -> list[str]:
        """All arguments, including those that follow from several options."""
        kept = self.kept
        if "model-name-or-path" in kept:
            self.done.insert(0, kept["model-name-or-path"])
        if self._is_on("use-peft") and "--lora" not in self.done:
            self.done += ["--lora", str(RANK)]
        self._add_objective()
        self._add_resume()
        self._add_optimizer()
        self._add_report()
        self._add_evaluations()
        if self._is_on("load-best-model-at-end"):
            self.set("run.keep_best", "true")
            self.set("run.export_best", "true")
        self._add_batch()
        self._add_schedule()
        self._add_precision()
        if self._is_on("train-on-inputs"):  # axolotl's
            self.done.append("--no-completion-only-loss")
        betas = [kept.get(f"adam-beta{n}") for n in (1, 2)]
        if any(betas):
            self.set(
                "optimizer.params.betas", f"[{betas[0] or 0.9}, {betas[1] or 0.999}]"
            )
        return self.done

    def _is_on(self, name: str) -> bool:
        return self.kept.get(name, "").lower() in TRUE

    def _add_objective(self) -> None:
        """The objective of a loss of DPO, in place of dpo if that is given."""
        name = self.kept.get("loss-type")
        if name is None:
            return
        if name not in LOSSES:
            raise ValueError(
                f"--loss-type {name}: it must be {' or '.join(LOSSES)}; another loss "
                f"has an objective of its own: --objective ({', '.join(FINETUNED)})."
            )
        objective = LOSSES[name]
        if "--objective" not in self.done:
            self.done += ["--objective", objective]
            return
        at = self.done.index("--objective") + 1
        given = self.done[at : at + 1]
        if given not in (["dpo"], [objective]):
            raise ValueError(
                f"--loss-type {name} is a loss of dpo, and --objective is "
                f"{' '.join(given)}. Give one of them."
            )
        self.done[at] = objective

    def _add_resume(self) -> None:
        value = self.kept.get("resume-from-checkpoint", "false")
        if value.lower() in TRUE:
            self.done.append("--resume")
        elif value.lower() not in FALSE:
            raise ValueError(
                f"--resume-from-checkpoint {value}: a run goes on from its own newest "
                "checkpoint, in OUTPUT.run: --resume."
            )

    def _add_optimizer(self) -> None:
        name = self.kept.get("optim", "adamw_torch")
        if name not in OPTIMIZERS:
            raise ValueError(
                f"--optim {name}: zinf finetune trains by AdamW. Another optimizer is "
                "named by --set 'optimizer={type: NAME, params: {lr: ...}}'."
            )
        if OPTIMIZERS[name] != "float32":
            self.set("optimizer.params.moments", OPTIMIZERS[name])

    def _add_report(self) -> None:
        name = self.kept.get("report-to", "none")
        if name == "tensorboard":
            self.set("run.tensorboard", "true")
        elif name != "none":
            raise ValueError(
                f"--report-to {name}: zinf writes metrics.jsonl, and TensorBoard's "
                "events: --report-to tensorboard."
            )

    def _add_evaluations(self) -> None:
        steps = self.kept.get("eval-steps")
        held_out = f"{KEYS['val-set-size']}="
        has_data = any(x == "--eval-data" or held_out in x for x in self.done)
        if steps is not None and has_data:
            self.set("run.evaluate_every", steps)
        elif steps is not None:
            self.say("--eval-steps: has no effect: there is no --eval-data.")

    def _add_batch(self) -> None:
        """Samples of a step: those per device, times accumulation, times devices."""
        rows = self.kept.get("per-device-train-batch-size")
        steps = self.kept.get("gradient-accumulation-steps")
        if rows is None and steps is None:
            return
        if "--samples" in self.done:
            raise ValueError(
                "--samples says how many samples a step has, and so do --per-device-"
                "train-batch-size and --gradient-accumulation-steps. Give one of them."
            )
        self.set("train_batch_size", "null")
        self.set("train_micro_batch_size_per_gpu", rows or str(ROWS_PER_DEVICE))
        self.set("gradient_accumulation_steps", steps or "1")

    def _add_schedule(self) -> None:
        ratio, steps = self.kept.get("warmup-ratio"), self.kept.get("warmup-steps")
        name = self.kept.get("lr-scheduler-type")
        if name is None and (ratio is not None or steps is not None):
            name = "linear"
        if name is None:
            return
        if name == "constant":
            self.set("scheduler", "null")
            return
        if name not in SCHEDULES:
            raise ValueError(
                f"--lr-scheduler-type {name}: it must be constant, "
                f"{', '.join(SCHEDULES)}; others are set by --set scheduler=..."
            )
        params = "warmup_num_steps: 0"
        if steps is not None and int(float(steps)):
            params = f"warmup_num_steps: {steps}"
        elif ratio is not None:
            params = f"warmup_ratio: {ratio}"
        self.set("scheduler", f"{{type: {name}, params: {{{params}}}}}")

    def _add_precision(self) -> None:
        is_fp16 = self._is_on("fp16")
        if is_fp16 or self.kept.get("bf16", "true").lower() in FALSE:
            self.set("bf16.enabled", "false")
        if is_fp16:
            self.set("fp16.enabled", "true")
        bits = {"load-in-4bit": "nf4", "load-in-8bit": "int8"}
        for name, encoding in bits.items():
            if self._is_on(name):
                self.done += ["--base-encoding", encoding]


# Options that are looked at when all are known.
KEPT = {
    "model-name-or-path",
    "use-peft",
    "train-on-inputs",
    "loss-type",
    "optim",
    "eval-steps",
    "load-best-model-at-end",
    "report-to",
    "resume-from-checkpoint",
    "per-device-train-batch-size",
    "gradient-accumulation-steps",
    "lr-scheduler-type",
    "warmup-ratio",
    "warmup-steps",
    "adam-beta1",
    "adam-beta2",
    "bf16",
    "fp16",
    "load-in-4bit",
    "load-in-8bit",
}
