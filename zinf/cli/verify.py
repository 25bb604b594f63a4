"""`zinf verify`: a config's run beside plain jax, or a model's class beside torch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zinf import hf
from zinf.cli.report import console
from zinf.cli.task import heading, refuse_teacher, task_of
from zinf.core.machine.devices import on_devices
from zinf.core.text.complaint import tell
from zinf.core.verification.verify import verify


def verify_config(
    path: Path, overrides: Sequence[str], num_steps: int, *, every: bool
) -> bool:
    """Trains a config in zinf and in plain jax; returns whether the results agree.

    The tokens are random, so no data is needed.
    """
    config, mesh = on_devices(path, overrides=overrides)
    refuse_teacher(config, "zinf verify")
    task = task_of(config)
    task.check_verified()
    (loss_fn, init, tx, config), named = task.arguments()
    specs = named.pop("batch")
    # The loss of evaluations has no part in training.
    named.pop("eval_loss_fn", None)
    tell(heading(path, config))
    assert config.model is not None
    random = np.random.default_rng(config.run.seed)
    tokens = {
        name: random.integers(0, config.model.vocab_size, spec.shape, spec.dtype)
        for name, spec in specs.items()
    }
    found = verify(
        loss_fn,
        init,
        tx,
        config,
        batch=tokens,
        num_steps=num_steps,
        mesh=mesh,
        **named,
    )
    console().print(found.shown(every=every), soft_wrap=True)
    return found.agrees


def verify_class(folder: Path) -> bool:
    """Compares a tiny model of a model's class with torch; returns whether they agree.

    The verdict is computed anew, and remembered.
    """
    verdict = hf.verdict_of(hf.load(folder), anew=True)
    tell(str(verdict))
    return verdict.agrees
