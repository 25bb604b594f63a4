"""What cannot be trained is refused before anything is made, with what to change."""

import re
import shutil
import traceback
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.robustness.small import BATCH, DIM, draw, init, loss_fn, on_nvme
from zinf.memory.storage_error import StorageError

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("leaf", "kind"), [("text", "str"), (object(), "object"), (max, "builtin")]
)
def test_a_parameter_that_is_no_array_is_named_with_its_type(leaf, kind, start):
    with pytest.raises(ValueError, match=rf"layers/1/note.*{kind}"):
        start(params={"layers": [{"w": jnp.ones(2)}, {"note": leaf}]})


def test_none_is_an_empty_part_of_the_parameters(start):
    params = {**init(), "unused": None}
    engine = start(params=params, batch=draw())
    engine.step(draw())
    assert engine.params()["unused"] is None


def test_parameters_with_one_key_path_are_refused(start):
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"same key path: a/b\. Rename"):
        start(params=params)


def test_parameters_without_leaves_are_refused(start):
    with pytest.raises(ValueError, match="no leaves"):
        start(params={"a": {}})


def test_an_optimizer_that_clips_updates_says_where_clipping_is_done(start):
    tx = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match="is the first transform of the chain"):
        start(tx=tx)


def test_an_unknown_key_is_named_with_the_nearest(start):
    with pytest.raises(ValueError, match=r"gradient_clippin.*gradient_clipping"):
        start({"gradient_clippin": 1.0})


def test_a_missing_config_file_is_named(tmp_path, start):
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml does not exist"):
        start(str(tmp_path / "absent.yaml"))


def test_a_loss_that_is_no_scalar_is_refused(start):
    with pytest.raises(ValueError, match="one floating-point number"):
        start(loss=lambda p, b: b["x"] @ p["out"], batch=draw())


def test_an_nvme_folder_that_is_a_file_is_refused(tmp_path, start):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        start(on_nvme(path), batch=draw())
    assert path.read_text() == "mine"


def test_an_nvme_folder_of_another_program_is_left_alone(tmp_path, start):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"such as 'mine.txt'"):
        start(on_nvme(tmp_path), batch=draw())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("is_said", [True, False])
def test_a_drive_that_is_too_small_is_refused_with_numbers(
    is_said, monkeypatch, tmp_path, start
):
    """By the plan if the budget is what is free, else by the store."""
    free = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    config = on_nvme(tmp_path / "nvme")
    config["memory"] |= {"nvme_capacity": "1GiB"} if is_said else {}
    error = StorageError if is_said else ValueError
    with pytest.raises(error, match=r"[0-9],[0-9]{3}.* bytes") as caught:
        start(config, batch=draw())
    shown = f"{free:,}" if is_said else f"{int(free * 0.95):,}"
    assert shown in str(caught.value)


def test_a_full_drive_is_refused(monkeypatch, tmp_path, start):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 0))
    with pytest.raises(StorageError, match="no free bytes"):
        start(on_nvme(tmp_path / "nvme"), batch=draw())


@pytest.mark.slow
def test_state_that_fits_nowhere_is_refused_with_numbers(start):
    memory = {"device": "1KiB", "host": "1KiB"}
    with pytest.raises(ValueError, match=r"1,024 bytes.*at least [0-9,]+"):
        start({"memory": memory}, batch=draw())


def test_an_engine_after_close_is_refused_not_begun_anew(start):
    engine = start(batch=draw())
    engine.step(draw())
    engine.close()
    for use in (engine.step, engine.evaluate, lambda _: engine.params()):
        with pytest.raises(RuntimeError, match="was closed"):
            use(draw())
    with pytest.raises(RuntimeError, match="was closed"):
        engine.restore("anywhere")
    engine.close()


def test_a_frozen_pattern_that_matches_nothing_is_refused(start):
    with pytest.raises(ValueError, match=r"no parameter matches 'layer/\*'"):
        start({"frozen": ["layer/*"]})


def test_a_model_that_is_frozen_whole_stays_as_it_is(start):
    engine = start({"frozen": ["*"]}, batch=draw())
    engine.step(draw())
    chex.assert_trees_all_equal(engine.params(), init(), strict=True)


# What a newcomer does wrong on the first day: one clear sentence each.

TX = optax.sgd(0.1)


def first_step(
    loss: Any = loss_fn,
    params: Any = init,
    tx: Any = TX,
    config: Any = None,
    *,
    batch: Any = None,
    **rest: Any,
) -> None:
    """An engine and a step of it, on arguments of which one is wrong."""
    batch = draw() if batch is None else batch
    with zinf.initialize(loss, params, tx, config, **rest) as engine:
        engine.step(batch)


def returning(value: Any) -> Callable:
    """A loss that returns what `value` makes of the right one."""
    return lambda params, batch: value(loss_fn(params, batch))


def with_key(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    return loss_fn(params, batch)


def donated(tree: Any) -> Any:
    """A copy of it that another function took."""
    tree = jax.tree.map(jnp.array, tree)
    jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(tree)
    return tree


def leaking() -> Callable:
    seen: list[Any] = []
    jax.jit(lambda x: seen.append(x))(1.0)
    return returning(lambda loss: loss * seen[0])


def with_ref(params: Any, batch: Any) -> jax.Array:
    total = jax.new_ref(jnp.zeros(()))
    total[...] = loss_fn(params, batch)
    return total[...]


def with_ref_in_loop(params: Any, batch: Any) -> jax.Array:
    def add(carry: Any, x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jnp.sum(x)
        return carry + total[...], None

    return loss_fn(params, batch) + jax.lax.scan(add, 0.0, batch["x"])[0]


def evaluated_on_shapes() -> None:
    with zinf.initialize(loss_fn, init, TX) as engine:
        engine.evaluate(jax.eval_shape(draw))


def in_jit() -> None:
    jax.jit(lambda batch: first_step(batch=batch))(draw())


KEY = jax.random.key(0)
SENTENCES: dict[str, tuple[Callable[[], Any], str]] = {
    "rng, and a loss without a key": (
        lambda: first_step(rng=KEY),
        r"rng= was given.*loss_fn\(params.*takes no key.*leave rng= out",
    ),
    "a loss with a key, and no rng": (
        lambda: first_step(with_key),
        r"zinf calls loss_fn\(params, batch\).*with_key\(.*pass rng=jax.random.key",
    ),
    "a loss of one argument": (
        lambda: first_step(lambda params: 0.0),
        r"zinf calls loss_fn\(params, batch\), but loss_fn is <lambda>\(params\)",
    ),
    "rng is a seed": (
        lambda: first_step(with_key, rng=0),
        r"one random key, such as jax.random.key\(0\); found 0",
    ),
    "rng is nnx.Rngs": (
        lambda: first_step(with_key, rng=nnx.Rngs(0)),
        r"one random key.*found a Rngs",
    ),
    "rng is several keys": (
        lambda: first_step(with_key, rng=jax.random.split(KEY, 3)),
        r"one random key.*found an array key<fry>\[3\]",
    ),
    "a learning rate of null": (
        lambda: zinf.Config.load(
            {"optimizer": {"type": "Adam", "params": {"lr": None}}}
        ),
        r"optimizer.params.lr = None: must be a valid number",
    ),
    "a mutable array": (
        lambda: first_step(with_ref),
        r"mutable array \(jax.new_ref\).*x.at\[i\].set",
    ),
    "a mutable array in a loop": (
        lambda: first_step(with_ref_in_loop),
        r"mutable array \(jax.new_ref\)",
    ),
    "a loss with aux, without has_aux": (
        lambda: first_step(returning(lambda loss: (loss, {}))),
        r"a tuple of 2.*has_aux=True",
    ),
    "has_aux, and the loss alone": (
        lambda: first_step(has_aux=True),
        r"must return \(loss, aux\); it returned float32\[\]",
    ),
    "a loss that is a vector": (
        lambda: first_step(returning(lambda loss: jnp.stack([loss, loss]))),
        r"one floating-point number; it returned float32\[2\]. Take the mean",
    ),
    "a loss in a dict": (
        lambda: first_step(returning(lambda loss: {"loss": loss})),
        r"it returned a dict with float32\[\]",
    ),
    "a loss that returns nothing": (
        lambda: first_step(returning(lambda loss: None)),
        r"it returned None",
    ),
    "a loss that is a Python number": (
        lambda: first_step(returning(lambda loss: 1.0)),
        r"it returned 1.0. A number that depends on no parameter",
    ),
    "a loss that is an integer": (
        lambda: first_step(returning(lambda loss: loss.astype(int))),
        r"it returned int32\[\]",
    ),
    "the gradient in place of the loss": (
        lambda: first_step(jax.grad(loss_fn)),
        r"it returned a dict with float32",
    ),
    "a loss of a model from outside": (
        lambda: first_step(lambda params, batch: loss_fn(init(), batch)),
        r"depends on no parameter.*not a model from outside",
    ),
    "text beside the loss": (
        lambda: first_step(returning(lambda x: (x, {"name": "a"})), has_aux=True),
        r"returned 'name' as 'a', beside the loss",
    ),
    "integer parameters": (
        lambda: first_step(params={"w": np.ones(4, np.int32)}),
        r"No parameter is floating-point.*'w' is int32. Cast",
    ),
    "a tracer of another function": (
        lambda: first_step(leaking()),
        r"closes over float32\[\] of another function.*leaked tracer",
    ),
    "an engine inside of jax.jit": (in_jit, r"inside of a function that jax traces"),
    "an optimizer that was not called": (
        lambda: first_step(tx=optax.adam),
        r"found the function adam. Call what makes one: optax.adamw\(3e-4\)",
    ),
    "the class of optimizers": (
        lambda: first_step(tx=optax.GradientTransformation),
        r"found the class GradientTransformation",
    ),
    "no optimizer": (
        lambda: first_step(tx=None),
        r"tx must be an optax.GradientTransformation; found None",
    ),
    "a learning rate in place of an optimizer": (
        lambda: first_step(tx=1e-3),
        r"GradientTransformation; found 0.001. Give one",
    ),
    "parameters before the loss": (
        lambda: first_step(init(), loss_fn),
        r"loss_fn must be a function; found a dict. The order is",
    ),
    "an init function that takes a key": (
        lambda: first_step(params=lambda key: init()),
        r"params is the function <lambda>\(key\).*lambda: init\(key\)",
    ),
    "donated parameters": (
        lambda: first_step(params=donated(init())),
        r"parameter leaf 'layers/0/b' was deleted.*donated",
    ),
    "a donated batch": (
        lambda: first_step(batch=donated(draw())),
        r"batch leaf 'x' was deleted.*donated",
    ),
    "a module with dropout, without its adapter": (
        lambda: first_step(params=nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
        r"params is the NNX module Dropout.*zinf.nnx.initialize\(loss_fn, module",
    ),
    "an empty batch": (
        lambda: first_step(batch=draw(size=0)),
        r"batch leaf 'x' has shape \[0, 8\]: the batch is empty",
    ),
    "a batch of shapes": (
        lambda: first_step(batch=jax.eval_shape(draw)),
        r"jax.ShapeDtypeStruct, which has no values",
    ),
    "shapes to evaluate": (
        evaluated_on_shapes,
        r"jax.ShapeDtypeStruct, which has no values",
    ),
    "text in a batch": (
        lambda: first_step(batch={**draw(), "id": "a"}),
        r"batch leaf 'id' is a str",
    ),
    "a config of another type": (
        lambda: first_step(config=[1]),
        r"config must be a mapping, a path or a Config; found a list",
    ),
    "a mesh by name": (
        lambda: first_step(mesh="x"),
        r"mesh must be a jax.sharding.Mesh; found 'x'",
    ),
}


@pytest.mark.parametrize("mistake", SENTENCES)
def test_a_mistake_ends_in_one_sentence(mistake):
    make, sentence = SENTENCES[mistake]
    with pytest.raises((ValueError, NotImplementedError, TypeError)) as caught:
        make()
    error = caught.value
    assert re.search(sentence, str(error))
    # What is printed last is the sentence: no note of jax, and no other error before.
    assert error.__cause__ is None
    if mistake != "an engine inside of jax.jit":  # jax notes what passes through it
        assert not getattr(error, "__notes__", [])
        assert error.__context__ is None or error.__suppress_context__
    assert len(str(error).strip().splitlines()) <= 2


@pytest.mark.parametrize(
    "batch",
    [
        {**draw(), "scale": 2.0},
        {k: v.astype(np.float64) for k, v in draw().items()},
        {k: jnp.asarray(v) for k, v in draw().items()},
    ],
    ids=["Python number", "float64", "jax arrays"],
)
def test_batches_that_look_odd_train_as_the_others(batch, start):
    engine, usual = start(), start()
    assert engine.step(batch)["loss"] == usual.step(draw())["loss"]
    chex.assert_trees_all_equal(engine.params(), usual.params(), strict=True)


def test_an_error_of_the_loss_is_its_own_and_names_the_batch(start):
    def loss(params, batch):
        return loss_fn(params, {**batch, "x": batch["inputs"]})

    with pytest.raises(KeyError, match="inputs") as caught:
        start(loss=loss, batch=draw())
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    # Below zinf's call of the trace comes the user's function, and nothing else.
    assert frames[-1] == "loss"
    assert "in_modes" not in frames
    (note,) = [n for n in caught.value.__notes__ if "loss_fn raised this" in n]
    assert "x float32[4, 8], y float32[4, 8]" in note


def test_what_an_error_of_the_loss_came_from_is_shown(start):
    def loss(params, batch):
        try:
            return batch["inputs"]
        except KeyError:
            raise LookupError("no inputs")  # noqa: B904

    with pytest.raises(LookupError, match="no inputs") as caught:
        start(loss=loss, batch=draw())
    assert "KeyError" in "".join(traceback.format_exception(caught.value))


def test_a_batch_that_does_not_fit_is_compared_with_the_one_before(start):
    engine = start(batch=draw())
    losses = [engine.step(draw())["loss"]]
    wrong = {**draw(), "x": np.ones((BATCH, DIM + 1), np.float32)}
    with pytest.raises(TypeError) as caught:
        engine.step(wrong)
    note = "'x' is float32[4, 9], before it was float32[4, 8]"
    assert note in caught.value.__notes__[-1]
    printed = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(printed) < 60  # 110 before
    with pytest.raises(KeyError) as caught:
        engine.step({"z": wrong["x"]})
    assert "the one before had PyTreeDef({'x'" in caught.value.__notes__[-1]
    losses.append(engine.step(draw())["loss"])
    undisturbed = start()
    assert losses == [undisturbed.step(draw())["loss"] for _ in range(2)]
