"""The best checkpoint is kept, and a run ends when evaluations get no better."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.checkpoint import Checkpoints
from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted

BATCH = np.ones((2, 3), np.float32)
LOSSES = [3.0, 2.0, 5.0, 4.0, 4.0, 1.0, 9.0]


@pytest.fixture
def start(monkeypatch):
    """Engines whose evaluation after step n is LOSSES[n - 1], with a weight."""
    opened = []

    def evaluate(batch, kind):
        return Weighted(7 * LOSSES[opened[-1].num_steps - 1], 7.0)

    def start():
        def loss(params, batch):
            return jnp.mean(jnp.square(batch @ params))

        tx = optax.sgd(0.1)
        opened.append(zinf.initialize(loss, np.eye(3, dtype=np.float32), tx, {}))
        monkeypatch.setattr(opened[-1], "evaluate_weighted", evaluate)
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


def run(engine, folder, steps, **rest):
    """Trains with an evaluation after each step; returns the steps that are saved."""
    with Checkpoints(folder, keep=1) as checkpoints:
        options = {"evaluation_data": [BATCH], "evaluate_every": 1, **rest}
        data = [BATCH] * 9
        zinf.Trainer(
            engine, data, steps=steps, checkpoints=checkpoints, **options
        ).run()
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.parametrize("patience, last", [(1, 3), (3, 5), (4, 7), (None, 7)])
def test_a_run_ends_after_so_many_evaluations_that_are_no_better(
    start, tmp_path, capsys, patience, last
):
    """An evaluation that equals the best is no better."""
    engine = start()
    assert run(engine, tmp_path / "saved", 7, patience=patience) == {last}
    printed = capsys.readouterr().out
    assert engine.num_steps == last
    assert ("were no better than the one after step 2" in printed) == (last < 7)
    best = "1, was after step 6" if last == 7 else "2, was after step 2"
    assert f"The best evaluation, {best}.\n" in printed


def test_the_best_checkpoint_stays_until_a_better_one_is_complete(start, tmp_path):
    """Also over resumed runs, which know how many evaluations were worse."""
    folder = tmp_path / "saved"
    assert run(start(), folder, 1, keep_best=True) == {1}
    assert run(start(), folder, 2, keep_best=True) == {2}
    assert run(start(), folder, 4, keep_best=True) == {2, 4}
    resumed = start()
    assert run(resumed, folder, 7, keep_best=True, patience=3) == {2, 5}
    assert resumed.num_steps == 5
    assert run(start(), folder, 7, keep_best=True) == {6, 7}


def test_a_save_of_the_best_that_fails_leaves_the_one_before(
    start, tmp_path, monkeypatch
):
    engine, folder = start(), tmp_path / "saved"
    save = Checkpoints.save

    def failing(self, step, *rest):
        if step == 2:
            raise OSError("no room")
        save(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", failing)
    assert run(engine, folder, 5, keep_best=True, checkpoint_every=1) == {1, 5}


def test_both_go_by_evaluations(start, tmp_path):
    for options in ({"keep_best": True}, {"patience": 2}):
        with pytest.raises(ValueError, match="set evaluate_every"):
            run(start(), tmp_path / "saved", 3, evaluate_every=None, **options)
        with pytest.raises(ValueError, match="set run.evaluate_every"):
            Config.load({"run": options})
