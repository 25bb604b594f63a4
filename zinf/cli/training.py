"""Declares `zinf train`, `finetune`, `grpo` and `ppo`, which train a model."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from zinf.cli.arguments import (
    AllowChanged,
    ConfigFile,
    IgnoreUnsupported,
    Overrides,
    ShowTraceback,
    WholeModel,
    settings,
)
from zinf.cli.errors import clean_errors
from zinf.cli.options import FINETUNE, GRPO, PPO, with_options
from zinf.distributed.options import Place, in_place_of, with_place
from zinf.ray.options import OnCluster, with_cluster

TunedModel = Annotated[Path, typer.Option(help="Folder for the tuned model.")]
Prompts = Annotated[
    list[Path],
    typer.Option(
        help="JSON lines or parquet of prompt (a text or messages); other fields go to "
        "the rewards; repeatable."
    ),
]
_REWARD = typer.Option(
    help="FILE.py:FUNCTION of (prompts, completions, **columns), which returns a "
    "number or None for each completion; or a reward model, as a folder or a name; "
    "repeatable."
)
RewardNames = Annotated[list[str], _REWARD]
MaybeRewards = Annotated[list[str] | None, _REWARD]
PromptEpochs = Annotated[float, typer.Option(help="How often each prompt is used.")]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge/--no-merge",
        help="Write the model with its adapters added to OUTPUT, and the adapters to "
        "OUTPUT.adapter; else the adapters alone to OUTPUT.",
    ),
]


@with_place
@with_cluster
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    ignore_unsupported: IgnoreUnsupported = False,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, in place of run.steps.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="File of metrics, in place of run.metrics.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File for a trace of the first steps, not in run.output."),
    ] = None,
    trace_steps: Annotated[
        int, typer.Option(min=1, help="Steps that the trace has.")
    ] = 3,
    allow_changed: AllowChanged = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
    cluster: OnCluster,
) -> None:
    """Train the model of a config file.

    The exit code is 3 if another process ended the run.
    """
    from zinf.cli.placed import run_placed
    from zinf.cli.train import train_config
    from zinf.core.config.load import raw_config

    given = settings(overrides, ignore_unsupported)
    if steps is not None:
        given.append(f"run.steps={steps}")
    if metrics is not None:
        given.append(f"run.metrics={json.dumps(str(metrics))}")
    run = partial(
        train_config,
        config.absolute() if cluster.ray else config,
        trace=trace,
        trace_steps=trace_steps,
        allow_changed=allow_changed or (),
    )
    with clean_errors(traceback):
        raw = raw_config(config) if cluster.ray else {}
    where = {"place": place, "cluster": cluster, "traceback": traceback}
    run_placed(run, raw, given, **where)


@dataclass(frozen=True)
class Tuning:
    """What the options of all commands that tune a model of transformers say.

    Attributes:
        merge: whether adapters are added to the model that is written.
        allow_changed: settings that may be others than before.
        overrides: keys with values, as of `--set`.
    """

    merge: bool
    allow_changed: list[str] | None
    overrides: list[str] | None
    traceback: bool

    def run(
        self,
        raw: dict[str, Any],
        output: Path,
        epochs: float,
        place: Place,
        cluster: OnCluster,
    ) -> None:
        """Train the model of a config that a command has made, and write it.

        Args:
            epochs: how often each sample or prompt is used.
        """
        from zinf.cli.finetune import finetune_model, run_folder
        from zinf.cli.placed import run_placed

        tune = partial(
            finetune_model,
            raw,
            output=output,
            merges=self.merge,
            epochs=epochs,
            allow_changed=self.allow_changed or (),
        )
        raw = raw | {"run": {"output": str(run_folder(output))} | raw["run"]}
        where = {"place": place, "cluster": cluster, "traceback": self.traceback}
        run_placed(tune, raw, self.overrides or (), **where)


# The options of all commands that tune a model, in place of `tuning`.
with_tuning = in_place_of(
    "tuning",
    {
        "merge": (Merge, True),
        "allow_changed": (AllowChanged, None),
        "overrides": (Overrides, None),
        "traceback": (ShowTraceback, False),
    },
    Tuning,
)


@with_place
@with_cluster
@with_options(FINETUNE)
@with_tuning
def finetune(
    model: WholeModel,
    data: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines or parquet of text, prompt and completion, messages, "
            "conversations (ShareGPT) or instruction and output (Alpaca); repeatable."
        ),
    ],
    output: TunedModel,
    epochs: Annotated[float, typer.Option(help="How often each sample is used.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 8,
    *,
    tuning: Tuning,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Fine-tune a model of transformers, and write it in the form and dtype it came in.

    The config, checkpoints and metrics of the run are in the folder OUTPUT.run. All
    parameters are trained, with masters in float32 and computing in bfloat16; with
    --lora, small adapters beside the frozen parameters.
    """
    from zinf.cli.finetune import model_config

    with clean_errors(tuning.traceback):
        raw = model_config(model, data=data, samples=samples, **options)
    tuning.run(raw, output, epochs, place, cluster)


@with_place
@with_cluster
@with_options(GRPO)
@with_tuning
def grpo(
    model: WholeModel,
    data: Prompts,
    output: TunedModel,
    reward: MaybeRewards = None,
    epochs: PromptEpochs = 1.0,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Completions of a step; those of a prompt if absent."),
    ] = None,
    *,
    tuning: Tuning,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Train a model of transformers on what it writes itself, by rewards.

    For each prompt it draws several completions, and those that are rewarded more than
    the others become likelier (GRPO, or RLOO). Options have the names of TRL. Metrics,
    completions and checkpoints of the run are in the folder OUTPUT.run.
    """
    from zinf.cli.finetune import of_rewards

    with clean_errors(tuning.traceback):
        raw = of_rewards(
            model, "grpo", data=data, rewards=reward or (), samples=samples, **options
        )
    tuning.run(raw, output, epochs, place, cluster)


@with_place
@with_cluster
@with_options(PPO)
@with_tuning
def ppo(
    model: WholeModel,
    data: Prompts,
    reward: RewardNames,
    output: TunedModel,
    epochs: PromptEpochs = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Completions of a step.")] = 8,
    *,
    tuning: Tuning,
    place: Place,
    cluster: OnCluster,
    **options: Any,
) -> None:
    """Train a model of transformers on what it writes itself, by rewards and a critic.

    The critic foretells the reward at each token, and what is rewarded more than it
    foretold becomes likelier (PPO). Both are trained, beside the model as it was and
    the reward models, within one budget. Options have the names of TRL. Metrics,
    completions and checkpoints of the run are in the folder OUTPUT.run.
    """
    from zinf.cli.finetune import of_rewards

    with clean_errors(tuning.traceback):
        raw = of_rewards(
            model, "ppo", data=data, rewards=reward, samples=samples, **options
        )
    tuning.run(raw, output, epochs, place, cluster)
