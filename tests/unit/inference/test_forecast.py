"""What generation is predicted to cost: the plans are those that generation runs."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from zinf.core.plan import Link
from zinf.core.program import Tier
from zinf.core.step.setup import AtRest
from zinf.inference import (
    Forecast,
    GenerationPlanner,
    Sampling,
    Steps,
    forecasts,
    saturating,
    weight_bytes,
)
from zinf.models import GPT, GPTConfig, next_token_loss

pytestmark = pytest.mark.slow
SHAPE = GPTConfig(num_layers=2, num_heads=2, embed_dim=32, max_length=64, vocab_size=97)
BATCH = {"tokens": np.zeros((8, 17), np.int32)}
LENGTHS = {"prompt_length": 16, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = {
        "execution": "streamed",
        "frozen": ["*"],
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "persistence_threshold": 0,
        "memory": {"nvme": str(tmp_path_factory.mktemp("nvme"))},
    }
    create = lambda: GPT(SHAPE, rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(
        next_token_loss, create, optax.identity(), config, batch=BATCH
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def planner(engine):
    made, of_params = engine.planner, engine._of_params()
    at_rest = AtRest(engine.plan.homes, engine.residents.layouts)
    steps = Steps(
        made.problem,
        engine._decoder(None),
        Sampling(temperature=0.0),
        lambda f: made.problem.bound(of_params(f)),
        jax.random.key(0),
    )
    return GenerationPlanner(made, at_rest, steps)


def test_the_plans_are_those_that_generation_runs(engine, planner):
    engine.generate([[1] * 16] * 24, max_new_tokens=6)
    _, ran = list(engine._programs.made._made.items())[-1]
    (found,) = forecasts(planner, (24,), **LENGTHS)
    assert isinstance(found, Forecast)
    ran = planner.repeated(ran, 3)
    for name in ("prefill", "decode"):
        planned, run = (getattr(x, name).plan for x in (found.made, ran))
        assert planned.instructions == run.instructions
    seconds = found.made.decode.plan.timeline.seconds
    assert found.tokens_per_second == 24 / seconds


def test_weights_cross_the_drive_once_a_token_however_many_sequences(engine, planner):
    resting = weight_bytes(engine.plan, planner)
    numbers = sum(x.size for x in jax.tree.leaves(engine.params()))
    assert resting == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.NVME: 4 * numbers}
    found = list(forecasts(planner, (1, 8, 64), **LENGTHS))
    # Keys and values of two layers in 32 slots, and the slots in use.
    of_row = 2 * 2 * 32 * SHAPE.embed_dim * 4 + 4
    for each in found:
        assert each.bytes_of(Link.NVME_READ) == 4 * numbers
        assert each.cache_bytes == each.batch_size * of_row
        assert each.cache_tiers == (Tier.DEVICE,)


def test_sizes_are_doubled_until_that_gains_little(planner):
    found = list(forecasts(planner, **LENGTHS))
    sizes = [each.batch_size for each in found]
    assert sizes == [1, *(8 << i for i in range(len(sizes) - 1))]
    rates = [each.tokens_per_second for each in found]
    assert rates[-1] <= 1.1 * rates[-2]
    assert all(b > 1.1 * a for a, b in zip(rates[1:-2], rates[2:-1], strict=True))
    enough = saturating(found)
    assert enough is not None and enough.tokens_per_second >= max(rates) / 1.1
    before = found[: found.index(enough)]
    assert all(each.tokens_per_second < max(rates) / 1.1 for each in before)
    assert saturating(found[:1]) is None


def test_what_is_longer_than_the_model_allows_is_refused(planner):
    with pytest.raises(ValueError, match=r"60 tokens.*more than the 64.*at most 4"):
        list(forecasts(planner, prompt_length=60, max_new_tokens=5))
    assert list(forecasts(planner, (1,), prompt_length=60, max_new_tokens=4))
