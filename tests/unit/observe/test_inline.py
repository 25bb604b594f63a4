"""What a notebook shows of an engine, a plan, metrics, a config, and in pictures."""

import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.unit.observe.cases import metrics_of, step_of
from zinf.core.engine.metrics import StepMetrics
from zinf.observe import (
    JsonLines,
    plot_experts,
    plot_losses,
    plot_timeline,
)
from zinf.observe.plot import plot

CONFIG = {
    "execution": "streamed",
    "memory": {"device": "1MiB", "host": "2MiB"},
    "gradient_clipping": 1.0,
}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["in"])
    loss = jnp.mean((hidden @ params["out"]) ** 2)
    return loss, {"scale": jnp.float32(0.5)}


def new_engine() -> zinf.Engine:
    params = {"in": np.ones((8, 16), np.float32), "out": np.ones((16, 4), np.float32)}
    return zinf.initialize(loss_fn, params, optax.adam(1e-3), CONFIG, has_aux=True)


@pytest.fixture(scope="module")
def engine():
    with new_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def history(engine) -> list[StepMetrics]:
    return [engine.step(np.ones((4, 8), np.float32)) for _ in range(3)]


def test_metrics_are_a_dict_everywhere_and_are_shown_with_units(history):
    metrics = history[0]
    assert isinstance(metrics, dict)
    assert metrics["step"] == 1 and metrics == {**metrics}
    numbers = {key: metrics[key] for key in metrics if key != "aux"}
    assert json.loads(json.dumps(numbers)) == numbers
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert type(pickle.loads(pickle.dumps(metrics))) is StepMetrics
    shown = repr(metrics)
    assert shown.startswith(f"StepMetrics(step=1, loss={metrics['loss']:.4g}, ")
    assert re.search(r"device_bytes=[\d.]+ (B|KiB), ", shown)
    assert re.search(r"step_seconds=[\d.]+ m?s, ", shown)
    html = metrics._repr_html_()
    assert all(f">{key}<" in html for key in metrics)


def test_metrics_are_the_pytree_that_a_dict_is(history):
    plain, metrics = dict(history[0]), history[0]
    paths = jax.tree_util.tree_leaves_with_path(metrics)
    expected = jax.tree_util.tree_leaves_with_path(plain)
    assert [path for path, _ in paths] == [path for path, _ in expected]
    # One leaf a number, as with a dict; a subclass that jax does not know is one leaf.
    means = jax.tree.map(lambda *xs: np.mean(xs), *history)
    assert type(means) is StepMetrics
    assert means["step"] == 2.0
    assert means["aux"]["scale"] == 0.5


def test_an_engine_says_how_far_it_is(engine, history):
    plan = engine.plan
    assert repr(engine) == f"<Engine: {len(history)} steps taken; {plan!r}>"
    html = engine._repr_html_()
    assert plan._repr_html_() in html
    assert html.count("predicted") == 1, "no sentence is there twice"
    fresh = new_engine()
    assert "0 steps taken; it is planned when the first batch is known" in repr(fresh)
    assert "planned when" in fresh._repr_html_()
    fresh.close()
    assert repr(fresh).startswith("<Engine: 0 steps taken; This engine was closed.")


def test_a_plan_says_in_one_line_what_it_needs_and_in_a_table_what_moves(engine):
    plan = engine.plan
    shown = repr(plan)
    assert "\n" not in shown and len(shown) < 200
    assert shown.startswith(f"<Plan: {len(plan.instructions)} instructions, predicted")
    assert "at most device " in shown
    html = plan._repr_html_()
    for words in ("budget", "1.00 MiB", "2.00 MiB", "binds", "h2d", "All "):
        assert words in html
    assert str(plan.instructions[0].operation) in html


def test_a_config_shows_the_keys_that_were_given():
    config = zinf.Config.load(CONFIG)
    shown = repr(config)
    assert shown.startswith("Config(")
    assert "gradient_clipping=1.0" in shown and "execution='streamed'" in shown
    assert "Memory(device=1048576, host=2097152)" in shown
    assert "steps_per_print" not in shown and "checkpoint_every" not in shown
    html = config._repr_html_().replace("<wbr>", "")
    assert "<code>memory.host</code>" in html and "<code>2097152</code>" in html
    assert "checkpoint_every" not in html
    assert repr(zinf.Config.load()) == "Config()"
    assert "every key has its default" in zinf.Config.load()._repr_html_()


def test_a_timeline_is_drawn_of_a_step_a_plan_and_a_trace(engine, history):
    assert history
    ran = plot_timeline(engine.last_step)
    planned, traced = plot_timeline(engine.plan), plot_timeline(step_of())
    panels = [{bars.yaxis for bars in x.data} for x in (ran, planned, traced)]
    assert panels == [{"y", "y2"}, {"y"}, {"y", "y2"}]
    assert re.search(r"A step: .* measured, .* predicted", ran.layout.title.text)
    # The legend has each kind once.
    kinds = [bars.name for bars in ran.data if bars.showlegend]
    assert sorted(kinds) == sorted({bars.name for bars in ran.data})
    fresh = new_engine()
    with pytest.raises(ValueError, match="Take a step first"):
        plot_timeline(fresh.last_step)
    fresh.close()


def test_a_step_is_drawn_in_one_page_and_other_formats_are_named(tmp_path):
    step = step_of(1.25)
    plot(step, tmp_path / "step.html")
    html = (tmp_path / "step.html").read_text()
    assert "A step: 15.7 ms measured, 12.5 ms predicted (20% less)" in html
    assert not re.search(r"""<(script|link|img)[^>]* (src|href)=""", html)
    with pytest.raises(ValueError, match="another format"):
        plot(step, tmp_path / "step.png")


def test_losses_are_drawn_of_metrics_and_of_their_file(history, tmp_path):
    curve = plot_losses(history).data[0]
    assert curve.x == (1, 2, 3)
    losses = [metrics["loss"] for metrics in history]
    np.testing.assert_allclose(curve.y, losses, rtol=1e-5)
    writer = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        writer.write(metrics_of(step, evaluation_loss=None if step % 2 else 0.5))
    writer.close()
    curve, *_, evaluations = plot_losses(tmp_path / "metrics.jsonl").data
    assert (curve.x, curve.y) == ((1, 2, 3, 4), (4, 3, 2, 1))
    assert (evaluations.x, evaluations.y) == ((2, 4), (0.5, 0.5))
    with pytest.raises(ValueError, match="no step to draw"):
        plot_losses([])


def test_the_use_of_experts_is_drawn_of_metrics_and_of_their_file(tmp_path):
    def step(number, tokens, dropped):
        usage = {"tokens": np.array(tokens), "dropped": np.float32(dropped)}
        return {"step": number, "aux": {"experts": {"blocks/1": usage}}}

    # Three experts; of the second run each step has two microbatches.
    alone = [step(1, [6, 2, 0], 0.25), step(2, [4, 4, 8], 0.5)]
    both = [step(n, [[3, 1, 0], [3, 1, 0]], [0.0, 0.5]) for n in (1, 2)]
    for history, shares in ((alone, [0.75, 0.25]), (both, [0.75, 0.75])):
        path = tmp_path / f"{len(shares)}{shares[1]}.jsonl"
        writer = JsonLines(path)
        for metrics in history:
            writer.write(metrics)
        writer.close()
        for given in (history, path):
            figure = plot_experts(given)
            assert [band.stackgroup for band in figure.data] == ["1"] * 3
            assert figure.data[0].x == (1, 2)
            np.testing.assert_allclose(figure.data[0].y, shares)
            np.testing.assert_allclose(sum(np.array(b.y) for b in figure.data), 1)
            dropped = 0.5 if history is alone else 0.25
            (title,) = (text.text for text in figure.layout.annotations)
            assert title == f"blocks/1: {dropped:.1%} dropped"
    with pytest.raises(ValueError, match="say nothing about experts"):
        plot_experts([{"step": 1, "loss": 0.5}])
