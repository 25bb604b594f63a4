"""`zinf train`."""

import logging
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from zinf.checkpoint import Checkpoints
from zinf.cli.problem import dataset, heading, problem
from zinf.config import Config
from zinf.distributed import AbstractGroup, flat
from zinf.executor.devices import on_devices
from zinf.initialize import initialize
from zinf.optim.factory import build_schedule
from zinf.trainer import Trainer


def train_config(
    path: Path,
    overrides: Sequence[str],
    trace: Path | None,
    trace_steps: int,
    group: AbstractGroup,
) -> None:
    """Trains the model of a config file, as one of a group of processes."""
    config, mesh = on_devices(path, overrides=overrides)
    if group.count > 1:
        group.agree(_alike(config))
    # Orbax logs a traceback of every error, which it then raises all the same.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    data = dataset(config, "train", group)
    evaluates = config.run.evaluate_every is not None
    evaluation_data = dataset(config, "validation", group) if evaluates else None
    arguments, named = problem(config, group)
    say = _say if group.is_first else _say_nothing
    say(heading(path, config))
    with closing(initialize(*arguments, **named, mesh=mesh, group=group)) as engine:
        say(f"{engine.plan.summary()}\n")
        folder = config.run.output / "checkpoints"
        if group.is_first and not config.run.resume:
            _set_aside(folder)
        group.barrier("checkpoints of earlier runs are set aside")
        with Checkpoints(folder, keep=config.run.keep_checkpoints) as checkpoints:
            trainer = Trainer(
                engine,
                data,
                steps=config.run.steps,
                evaluation_data=evaluation_data,
                evaluate_every=config.run.evaluate_every,
                evaluate_batches=config.run.evaluate_batches,
                checkpoints=checkpoints,
                checkpoint_every=config.run.checkpoint_every,
                metrics=config.run.metrics,
                tensorboard=config.tensorboard_folder,
                trace=trace,
                trace_steps=trace_steps,
                log_every=config.log_every,
                learning_rate=build_schedule(config),
            )
            try:
                trainer.run()
            except KeyboardInterrupt:
                if checkpoints.latest_step() is not None:
                    say(f"Continue with: {resume_command(path, overrides)}")
                raise
    if config.run.metrics is not None:
        say(f"The metrics of each step are in {config.run.metrics}.")
    if trace is not None and trace.exists():
        drawn = shlex.join(["zinf", "plot", str(trace)])
        say(f"{trace} opens in https://ui.perfetto.dev; draw it with {drawn}")


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(text: str) -> None: ...


def _alike(config: Config) -> dict[str, Any]:
    """What all processes must have alike: every key but a host's own folders."""
    keys = flat(config.model_dump(mode="json"))
    own = ("nvme", "nvme_path")
    return {key: keys[key] for key in keys if key.rpartition(".")[2] not in own}


def _set_aside(folder: Path) -> None:
    """Renames the checkpoints of an earlier run, which a new one would replace."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    number = 1
    while (kept := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(kept)
    print(
        f"Checkpoints of an earlier run are kept in {kept}. To continue a run instead "
        "of starting anew, use --set run.resume=true.",
        flush=True,
    )


def resume_command(path: Path, overrides: Sequence[str]) -> str:
    """What to type to continue a run from its newest checkpoint."""
    settings = [o for o in overrides if not o.startswith("run.resume=")]
    options = [part for o in [*settings, "run.resume=true"] for part in ("--set", o)]
    return shlex.join(["zinf", "train", str(path), *options])
