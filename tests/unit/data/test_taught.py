"""Distillation: batches with a teacher's logits, and the student's loss."""

from functools import partial

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.checkpoint import Checkpoints
from zinf.data import TEACHER_LOGITS, Paced, Taught
from zinf.models import GPTConfig, divergence, init_and_loss
from zinf.models.gpt_functions import logits_of

ROWS, TOKENS, VOCAB = 2, 8, 256


def gpt(num_layers):
    return GPTConfig(
        num_layers=num_layers, num_heads=2, embed_dim=16, max_length=TOKENS
    )


def batches(count=8):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCAB, (count * ROWS, TOKENS + 1), np.int32)
    source = grain.MapDataset.source([{"tokens": row} for row in rows])
    return source.to_iter_dataset().batch(ROWS)


@pytest.mark.slow
def test_divergence_is_that_of_the_paper():
    student, teacher = jax.random.normal(jax.random.key(0), (2, 3, 5, 7))
    found = divergence(student, teacher, temperature=2.0)
    ours = np.asarray(jax.nn.softmax(student / 2), np.float64)
    theirs = np.asarray(jax.nn.softmax(teacher / 2), np.float64)
    wanted = 4 * (theirs * np.log(theirs / ours)).sum(-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    np.testing.assert_allclose(divergence(teacher, teacher), 0, atol=1e-6)
    # The gradient to the student is the difference of what both predict.
    gradient = jax.grad(lambda x: divergence(x, teacher).sum())(student)
    wanted = jax.nn.softmax(student) - jax.nn.softmax(teacher)
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)
    of_teacher = jax.grad(lambda x: divergence(student, x).sum())(teacher)
    assert not np.any(of_teacher)
    with pytest.raises(ValueError, match="the teacher's .3, 5, 6.*same vocabulary"):
        divergence(student, teacher[..., :6])


def test_batches_have_logits_until_a_step():
    data = Taught(batches(), lambda batch: batch["tokens"] * 2.0, until_step=3)
    iterator = iter(data)
    found = [next(iterator) for _ in range(2)]
    assert set(iterator.whole()) == {"tokens", TEACHER_LOGITS}
    # The batch of step 2 has logits, and those after it have none.
    assert [set(x) for x in iterator.coming(2)] == [
        {"tokens", TEACHER_LOGITS},
        {"tokens"},
    ]
    assert [set(x) for x in iterator.coming(1)] == [{"tokens", TEACHER_LOGITS}]
    assert iterator.coming(0) == []
    found += [next(iterator) for _ in range(3)]
    assert [set(x) for x in iterator.coming(2)] == [{"tokens"}]
    assert [TEACHER_LOGITS in batch for batch in found] == [True] * 3 + [False] * 2
    np.testing.assert_array_equal(found[1][TEACHER_LOGITS], found[1]["tokens"] * 2)


def test_batches_that_are_no_mappings_or_have_logits_are_refused():
    source = grain.MapDataset.source([np.zeros(3)]).to_iter_dataset()
    with pytest.raises(ValueError, match="the batch is a ndarray"):
        next(iter(Taught(source, np.asarray)))
    source = grain.MapDataset.source([{TEACHER_LOGITS: np.zeros(3)}]).to_iter_dataset()
    with pytest.raises(ValueError, match="a mapping of teacher_logits"):
        next(iter(Taught(source, np.asarray)))
    with pytest.raises(NotImplementedError, match="steps that get longer"):
        Taught(Paced(source), np.asarray)


@pytest.mark.slow
def test_a_student_is_taught_by_a_teacher_that_streams_from_a_drive(tmp_path):
    (make, loss), (make_teacher, teacher_loss) = (
        init_and_loss(gpt(layers), seed=layers, temperature=2.0) for layers in (1, 2)
    )
    frozen = {
        "execution": "streamed",
        "frozen": ["*"],
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "memory": {"nvme": [str(tmp_path)]},
    }
    logits, first = logits_of(gpt(2)), next(iter(batches()))
    named = {"config": frozen, "batch": first}
    with (
        zinf.initialize(
            teacher_loss, make_teacher, optax.identity(), **named
        ) as taught_by,
        zinf.initialize(loss, make, optax.adamw(1e-2)) as engine,
    ):
        taught = Taught(batches(), partial(taught_by.apply, logits), until_step=2)
        steps = zip(range(4), taught, strict=False)
        losses = [engine.step(batch)["loss"] for _, batch in steps]
    # The loss of the first step, computed at once.
    student, theirs = logits_of(gpt(1))(make(), first), logits(make_teacher(), first)
    wanted = loss(make(), first)
    wanted += jnp.mean(divergence(student, theirs, temperature=2.0))
    np.testing.assert_allclose(losses[0], wanted, rtol=1e-6)
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_a_trainer_resumes_in_the_middle_of_what_is_taught(tmp_path):
    make, loss = init_and_loss(gpt(1), seed=0)

    def run(steps, folder):
        logits = jnp.linspace(0, 1, VOCAB)

        def teacher(batch):
            shape = (ROWS, TOKENS, VOCAB)
            return np.broadcast_to(logits * len(batch), shape).astype(np.float32)

        engine = zinf.initialize(loss, make, optax.adamw(1e-2))
        with engine, Checkpoints(folder, keep=1) as checkpoints:
            data = Taught(batches(), teacher, until_step=3)
            trainer = zinf.Trainer(
                engine, data, steps=steps, checkpoints=checkpoints, log_every=100
            )
            return trainer.run()["loss"]

    whole = run(5, tmp_path / "whole")
    run(2, tmp_path / "parts")
    assert run(5, tmp_path / "parts") == whole
