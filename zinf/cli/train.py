"""`zinf train`."""

import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import grain
from jax.sharding import Mesh

from zinf.checkpoint import Checkpoints, Place, Saved
from zinf.cli.changes import Changed
from zinf.cli.endings import say as _say
from zinf.cli.endings import say_nothing
from zinf.cli.places import has_any, place_of_checkpoints
from zinf.cli.run_folder import check_places, check_resumed, decides, held_run
from zinf.cli.task import (
    devices,
    heading,
    is_published,
    learning_rate,
    make_engine,
    num_tokens,
    task_of,
    title,
)
from zinf.cli.teacher import plan_teacher
from zinf.core.config import Config
from zinf.core.engine.engine import Engine
from zinf.core.interchange import find
from zinf.core.machine.devices import on_devices
from zinf.core.sharding import batch_share
from zinf.core.step.run.calibrate import said_of_rates
from zinf.core.trainer import Hook, Trainer
from zinf.distributed import AbstractGroup, flat
from zinf.observe.record import METRICS, RUN, TRACE, RunRecord

# Name of the barrier that ends set-up: a restart after it continues this run.
SET_ASIDE = "checkpoints of earlier runs are set aside"


def train_config(
    path: Path,
    overrides: Sequence[str],
    trace: Path | None,
    trace_steps: int,
    group: AbstractGroup,
    allow_changed: Sequence[str] = (),
) -> None:
    """Trains the model of a config file, as one of a group of processes.

    Args:
        trace: file for the trace; None means `trace.json` in the folder of the run.
        allow_changed: keys in which a resumed run may differ from before.

    Raises:
        ValueError: a resumed run differs in others; the message names each.
        StorageError: another run writes to the same folder; the message says which.
    """
    config, mesh = on_devices(path, overrides=overrides)
    task_of(config).check_exports()
    check_places(config)
    with held_run(config, group):
        train_held(
            config,
            mesh,
            path,
            overrides,
            trace=trace,
            trace_steps=trace_steps,
            group=group,
            allow_changed=allow_changed,
        )


def train_held(
    config: Config,
    mesh: Mesh,
    path: Path,
    overrides: Sequence[str],
    *,
    trace: Path | None,
    trace_steps: int,
    group: AbstractGroup,
    allow_changed: Sequence[str],
) -> None:
    """`train_config` in a folder that is held; see `held_run`."""
    task = task_of(config)
    if not config.run.resume:
        task.check_files()
    if group.count > 1:
        _check_processes(config, group)
    say = _say if group.is_first else say_nothing
    content: dict[str, Any] = {}
    changes: list[dict[str, Any]] = []
    changed: Changed = {}
    # This prints which text it extracts, so it comes before contents are compared.
    share = {"process": batch_share(mesh)}
    data = task.dataset("train", group, **share, say=say)
    if group.is_first:
        content = decides(config)
        changes, changed = check_resumed(config, content, allow_changed, say)
    evaluation_data = None
    if config.run.evaluate_every is not None:
        evaluation_data = task.dataset(
            "validation", group, **share, say=lambda text: say(f"evaluation {text}")
        )
    say(heading(path, config))
    with ExitStack() as opened:
        engine, data = _opened(config, mesh, group, data, opened, say)
        of_rates = said_of_rates(engine.plan)
        say(f"{engine.plan.summary()}\n{of_rates}".rstrip() + "\n")
        task.before_training(engine, say)
        data, hooks = task.drawn(data, engine)
        if evaluation_data is not None:
            given = evaluation_data, engine
            weights = config.run.weights
            evaluation_data, _ = task.drawn(*given, evaluated=weights)
        output = config.run.output
        folder = place_of_checkpoints(config)
        metrics = config.run.metrics or output / METRICS
        drawn = trace or output / TRACE
        if group.is_first and not config.run.resume:
            _set_aside(output, folder, metrics, drawn)
        group.barrier(SET_ASIDE)
        with Checkpoints(folder, keep=config.run.keep_checkpoints) as checkpoints:
            if group.is_first:
                after_step = checkpoints.latest_step() or 0
                if changed:
                    changes.append({"after_step": after_step, "changed": changed})
                of_run = {"after_step": after_step, "decides": content}
                of_run |= {"changes": changes, "metrics": metrics, "trace": drawn}
                _record(config, mesh, path, engine, of_run).save(output)
            given = engine, evaluation_data
            measures = task.measures(*given, weights=config.run.weights)
            every = config.run.evaluate_every
            trainer = Trainer(
                engine,
                data,
                evaluation_data=evaluation_data,
                checkpoints=checkpoints,
                metrics=metrics,
                trace=drawn,
                trace_steps=trace_steps,
                describe=task.describe,
                hooks=[*hooks, *(Hook(m, every, at_end=True) for m in measures)],
                **_of_trainer(config),
            )
            try:
                trainer.run()
            except KeyboardInterrupt:
                has_saved = checkpoints.latest_step() is not None
                if has_saved and not group.goes_on_by_itself:
                    say(f"Continue with: {resume_command(path, overrides)}")
                raise
        best = checkpoints.best_step if config.run.export_best else None
        if group.count == 1 and best in (None, engine.num_steps):
            task.export(engine, say)
        elif group.is_first:
            # Reading an engine takes all processes; a checkpoint, only this one.
            with Saved(find(folder, best or engine.num_steps)) as saved:
                task.export(saved, say, step=best)
    say(f"The metrics of each step are in {metrics}.")
    if trace is not None and trace.exists():
        picture = shlex.join(["zinf", "plot", str(trace)])
        say(f"{trace} opens in https://ui.perfetto.dev; draw it with {picture}")
    say(f"Draw the run as a page: {shlex.join(['zinf', 'report', str(output)])}")


def _record(
    config: Config, mesh: Mesh, path: Path, engine: Engine, of_run: dict[str, Any]
) -> RunRecord:
    """The record of a run that begins now; `of_run` as of `RunRecord.of`."""
    return RunRecord.of(
        config,
        engine.plan,
        title=title(Path(path.name), config),
        num_tokens=num_tokens(config),
        devices=devices(mesh),
        has_measured_rates=engine.planner.has_measured_rates,
        begun=datetime.now().astimezone().isoformat(" ", "minutes"),
        **of_run,
    )


def _of_trainer(config: Config) -> dict[str, Any]:
    """The arguments of `Trainer` that a config gives."""
    run = config.run
    return {
        "steps": run.steps,
        "evaluate_every": run.evaluate_every,
        "evaluate_batches": run.evaluate_batches,
        "weights": run.weights,
        "keep_best": run.keep_best,
        "patience": run.patience,
        "checkpoint_every": run.checkpoint_every,
        "tensorboard": config.tensorboard_folder,
        "csv": config.csv_folder,
        "log_every": config.log_every,
        "learning_rate": learning_rate(config),
    }


def _opened(
    config: Config,
    mesh: Mesh,
    group: AbstractGroup,
    data: grain.IterDataset,
    opened: ExitStack,
    say: Callable[[str], None],
) -> tuple[Engine, grain.IterDataset]:
    """The opened engine and data of a run; batches have a teacher's logits, if any.

    Args:
        opened: closes what this opens.
    """
    if config.distillation is None or is_published(config):
        # A model of transformers has its teacher beside it.
        return opened.enter_context(closing(make_engine(config, mesh, group))), data
    teacher = plan_teacher(config, mesh)
    beside = teacher.beside()
    at_work = opened.enter_context(closing(teacher.open()))
    say(f"{teacher.summary()}; of {at_work.checkpoint}")
    with teacher.named_in_errors():
        engine = make_engine(beside, mesh, group)
    return opened.enter_context(closing(engine)), at_work.taught(data)


def _check_processes(config: Config, group: AbstractGroup) -> None:
    """Refuse what several processes cannot do, and configs that differ between them.

    The folders of a host may differ.
    """
    if config.distillation is not None:
        raise NotImplementedError(
            "distillation is supported in one process, and this run has "
            f"{group.count}. Start one, or leave the teacher out with --set "
            "distillation=null."
        )
    keys = flat(config.model_dump(mode="json"))
    own = ("nvme", "nvme_path")
    group.agree({k: keys[k] for k in keys if k.rpartition(".")[2] not in own})


def _set_aside(output: Path, checkpoints: Place, metrics: Path, trace: Path) -> None:
    """Moves the files of an earlier run to new folders with the same number.

    Its checkpoints go to `checkpoints.1`; its record, metrics and trace to `run.1`, a
    folder that `zinf report` can draw.

    Raises:
        FileExistsError: it has checkpoints in object storage, which moves nothing.
    """
    has_checkpoints = has_any(checkpoints)
    here = checkpoints if isinstance(checkpoints, Path) else output / "checkpoints"
    if has_checkpoints and here is not checkpoints:
        raise FileExistsError(
            f"{checkpoints} has checkpoints of an earlier run, and object storage "
            "cannot move them away. Continue that run (--set run.resume=true), or name "
            "another place (run.checkpoints)."
        )
    records = [path for path in (output / RUN, metrics, trace) if path.is_file()]
    # A trace without a record or metrics belongs to no run of this folder: the user
    # named the file, so it stays.
    has_records = (output / RUN).is_file() or metrics in records
    for number in count(1):
        run = output / f"run.{number}"
        folder = here.with_name(f"{here.name}.{number}")
        if not run.exists() and not folder.exists():
            break
    if has_checkpoints:
        here.rename(folder)
        _say(
            f"Checkpoints of an earlier run are kept in {folder}. To continue a run "
            "instead of starting anew, use --set run.resume=true."
        )
    if has_records:
        run.mkdir(parents=True)
        for path in records:
            shutil.move(path, run / path.name)
        _say(f"Metrics of an earlier run are kept in {run}.")


def resume_command(path: Path, overrides: Sequence[str]) -> str:
    """The command line that continues a run from its newest checkpoint."""
    settings = [o for o in overrides if not o.startswith("run.resume=")]
    options = [part for o in [*settings, "run.resume=true"] for part in ("--set", o)]
    return shlex.join(["zinf", "train", str(path), *options])
