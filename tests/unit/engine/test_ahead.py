"""Plans of coming batches are made in another thread, and only once."""

import threading
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.core.config.pacing import Pacing
from zinf.core.engine.ahead import Ahead
from zinf.core.step.planner import Planner
from zinf.core.trainer import Trainer
from zinf.data import Pace, Paced, Share, describe
from zinf.data.text import TokenWindows
from zinf.data.tokens import Tokens, text_part

LENGTHS = (4, 8, 12, 16)
PACING = Pacing.model_validate(
    {
        "min_difficulty": LENGTHS[0],
        "max_difficulty": LENGTHS[-1],
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 4},
    }
)
STREAMED = {"execution": "streamed", "gradient_clipping": 1.0}


def loss_fn(params, batch):
    tokens = batch["tokens"]
    logits = jnp.tanh(params["in"][tokens[:, :-1]]) @ params["out"]
    taken = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(taken, tokens[:, 1:, None], axis=2))


def engine(config: dict[str, Any], **named: Any) -> zinf.Engine:
    draw = np.random.default_rng(0).standard_normal
    params = {"in": draw((256, 8), np.float32), "out": draw((8, 256), np.float32)}
    return zinf.initialize(loss_fn, params, optax.adam(1e-2), config, **named)


def shapes(length: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"tokens": jax.ShapeDtypeStruct((4, length + 1), np.int32)}


def batch(length: int) -> dict[str, np.ndarray]:
    rows = np.arange(4 * (length + 1), dtype=np.int32) % 256
    return {"tokens": rows.reshape(4, length + 1)}


@pytest.fixture
def planned(monkeypatch) -> list[tuple[tuple[int, ...], str]]:
    """The shape of each plan that is made, and the thread that makes it."""
    made: list[tuple[tuple[int, ...], str]] = []
    plan = Planner.plan

    def noting(self, batch, homes=None):
        made.append((batch["tokens"].shape, threading.current_thread().name))
        return plan(self, batch, homes)

    monkeypatch.setattr(Planner, "plan", noting)
    return made


def test_a_run_with_four_lengths_makes_four_plans_and_only_its_first_step_waits(
    planned, monkeypatch, tmp_path
):
    """Steps are held up until the thread is done, as long steps would be."""
    waits: list[bool] = []
    take = Ahead.take

    def noting(self, shape):
        waits.append(self.is_waited_for(shape) or shape not in self)
        return take(self, shape)

    monkeypatch.setattr(Ahead, "take", noting)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 20)
    windows = TokenWindows(Tokens([text_part(text)]), sequence_length=LENGTHS[-1])
    share = Share(grain.MapDataset.source(windows).repeat(None), 4)
    data = Paced(share, length=Pace.of(PACING, max_buckets=8))
    lengths: list[int] = []
    with engine({}) as trained:

        def described(batch: Any) -> dict[str, int]:
            trained._runners.ahead.wait()
            lengths.append(describe(batch)["sequence_length"])
            return describe(batch)

        run = {"steps": 16, "describe": described, "log_every": 100}
        metrics = Trainer(trained, data, **run).run()
    assert list(dict.fromkeys(lengths)) == list(LENGTHS)
    assert metrics["sequence_length"] == LENGTHS[-1]
    assert metrics["tokens_seen"] == 4 * sum(lengths)
    # The largest batch is planned first, as it places the state; then the first batch.
    order = [LENGTHS[-1], *LENGTHS[:-1]]
    assert [shape for shape, _ in planned] == [(4, n + 1) for n in order]
    main = threading.current_thread().name
    assert [name == main for _, name in planned] == [True] * 2 + [False] * 2
    assert waits == [True] * 2 + [False] * 2


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="fused"),
        pytest.param(STREAMED, id="streamed", marks=pytest.mark.slow),
    ],
)
def test_a_plan_made_ahead_trains_as_one_made_when_the_batch_came(config):
    losses = []
    for is_ahead in (False, True):
        with engine(config, batch=shapes(8)) as trained:
            if is_ahead:
                trained.prepare_ahead(shapes(4))
            losses.append(
                [trained.step(batch(n))["loss"] for n in (8, 4, 4, 8, 4)]
                + [float(trained.evaluate(batch(4)))]
            )
    assert losses[0] == losses[1]


def test_an_error_of_a_plan_is_raised_when_its_batch_comes(monkeypatch):
    with engine({}, batch=shapes(8)) as trained:
        monkeypatch.setattr(Planner, "traced", lambda *_: 1 / 0)
        trained.prepare_ahead(shapes(4))
        trained.step(batch(8))
        with pytest.raises(ZeroDivisionError):
            trained.step(batch(4))
        monkeypatch.undo()
        trained.step(batch(4))
        assert trained.num_steps == 2


def test_several_processes_plan_before_the_call_returns(planned):
    """They agree on a plan, which takes a message of each at the same point."""
    with engine({}, batch=shapes(8)) as trained:
        group = type("Pair", (), {"count": 2, "agree": lambda self, values: None})
        object.__setattr__(trained.planner, "group", group())
        trained.prepare_ahead(shapes(4))
        assert planned[-1] == ((4, 5), threading.current_thread().name)
        trained.prepare_ahead(shapes(4))
        assert len(planned) == 2


def test_closing_waits_for_the_plan_that_is_being_made():
    ahead, begun, go = Ahead(), threading.Event(), threading.Event()
    made = []

    def make():
        begun.set()
        go.wait()
        made.append("done")

    ahead.begin((), make)
    begun.wait()
    assert ahead.is_waited_for(()) and () in ahead
    go.set()
    ahead.close()
    assert made == ["done"]
    assert () not in ahead and ahead.take(()) is None


def test_settings_of_the_calling_thread_hold_where_the_plan_is_made():
    """`with` blocks of jax hold in one thread only, and these change numbers."""
    ahead, found = Ahead(), []
    with jax.default_matmul_precision("highest"), jax.default_prng_impl("rbg"):
        ahead.begin((), lambda: found.append(jax.config.jax_default_matmul_precision))
        ahead.begin((1,), lambda: found.append(jax.config.jax_default_prng_impl))
    ahead.wait()
    ahead.close()
    assert found == ["highest", "rbg"]
