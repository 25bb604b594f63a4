"""What cannot be trained is refused before anything is made, with what to change."""

import shutil
import traceback
from collections import namedtuple
from collections.abc import Callable
from functools import partial
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
from tests.unit.refusals import error_of, text_of
from zinf.core.memory.storage_error import StorageError

Usage = namedtuple("Usage", "total used free")
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


def with_key(params, batch, key):
    return loss_fn(params, batch)


class Thing:
    """No array."""

    def __repr__(self) -> str:
        return "a thing"


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


LOSSES: dict[str, Callable] = {
    "a loss with a key, and no rng": with_key,
    "a loss of one argument": lambda params: 0.0,
    "a mutable array": with_ref,
    "a mutable array in a loop": with_ref_in_loop,
    "a loss with aux, without has_aux": returning(lambda x: (x, {})),
    "a loss that is a vector": returning(lambda x: jnp.stack([x, x])),
    "a loss in a dict": returning(lambda x: {"loss": x}),
    "a loss that returns nothing": returning(lambda x: None),
    "a loss that is a Python number": returning(lambda x: 1.0),
    "a loss that is an integer": returning(lambda x: x.astype(int)),
    "the gradient in place of the loss": jax.grad(loss_fn),
    "a loss of a model from outside": lambda params, batch: loss_fn(init(), batch),
}
PARAMS: dict[str, Callable[[], Any]] = {
    "text among the parameters": lambda: {"layers": [jnp.ones(2), {"note": "text"}]},
    "an object among the parameters": lambda: {"w": Thing()},
    "a function among the parameters": lambda: {"w": max},
    "two leaves of one key path": lambda: {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)},
    "no leaf": lambda: {"a": {}},
    "integer parameters": lambda: {"w": np.ones(4, np.int32)},
    "an init function that takes a key": lambda: lambda key: init(),
    "donated parameters": lambda: donated(init()),
    "a module without its adapter": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
}
OPTIMIZERS: dict[str, Any] = {
    "an optimizer that was not called": optax.adam,
    "the class of optimizers": optax.GradientTransformation,
    "no optimizer": None,
    "a learning rate in place of an optimizer": 1e-3,
}
BATCHES: dict[str, Callable[[], Any]] = {
    "a donated batch": lambda: donated(draw()),
    "an empty batch": lambda: draw(size=0),
    "a batch of shapes": lambda: jax.eval_shape(draw),
    "text in a batch": lambda: {**draw(), "id": "a"},
    "an array of text in a batch": lambda: {**draw(), "id": np.array(["a", "b"])},
    "an object in a batch": lambda: {**draw(), "id": Thing()},
}
KEYS: dict[str, Callable[[], Any]] = {
    "rng is a seed": lambda: 0,
    "rng is nnx.Rngs": lambda: nnx.Rngs(0),
    "rng is several keys": lambda: jax.random.split(jax.random.key(0), 3),
    "rng is a raw key of another length": lambda: jnp.zeros(3, jnp.uint32),
    "rng is a raw key of signed numbers": lambda: jnp.zeros(2, jnp.int32),
}
CONFIGS: dict[str, Any] = {
    "an unknown key": {"memory": {"hots": "1GiB"}},
    "a learning rate of null": {"optimizer": {"type": "Adam", "params": {"lr": None}}},
    "a frozen pattern that matches nothing": {"frozen": ["layer/*"]},
    "a batch of another size": {"train_batch_size": 8},
    "a batch that does not divide": {"gradient_accumulation_steps": 3},
    "a config of another type": [1],
}
IN_JIT = "an engine inside of jax.jit"
OTHERS: dict[str, Callable[[], Any]] = {
    "rng, and a loss without a key": lambda: first_step(
        returning(lambda x: x), rng=jax.random.key(0)
    ),
    "a loss with a key and state, and no rng": lambda: first_step(
        lambda params, state, batch, key: 0.0, model_state={"count": jnp.zeros(())}
    ),
    "has_aux, and the loss alone": lambda: first_step(has_aux=True),
    "text beside the loss": lambda: first_step(
        returning(lambda x: (x, {"name": "a"})), has_aux=True
    ),
    "a tracer of another function": lambda: first_step(leaking()),
    "parameters before the loss": lambda: first_step(init(), loss_fn),
    "a mesh by name": lambda: first_step(mesh="x"),
    "shapes to evaluate": evaluated_on_shapes,
    "text in the example of a batch": lambda: zinf.initialize(
        loss_fn, init, TX, batch={**draw(), "id": "a"}
    ),
    IN_JIT: lambda: jax.jit(lambda batch: first_step(batch=batch))(draw()),
}
MISTAKES: dict[str, Callable[[], Any]] = {
    **{name: partial(first_step, loss) for name, loss in LOSSES.items()},
    **{
        name: lambda make=make: first_step(params=make())
        for name, make in PARAMS.items()
    },
    **{name: partial(first_step, tx=tx) for name, tx in OPTIMIZERS.items()},
    **{
        name: lambda make=make: first_step(batch=make())
        for name, make in BATCHES.items()
    },
    **{
        name: lambda make=make: first_step(with_key, rng=make())
        for name, make in KEYS.items()
    },
    **{name: partial(first_step, config=config) for name, config in CONFIGS.items()},
    **OTHERS,
}


def test_a_mistake_ends_in_one_sentence(golden):
    errors = {name: error_of(call) for name, call in MISTAKES.items()}
    golden.check("bad_arguments.txt", text_of(errors))
    for name, error in errors.items():
        # What is printed last is the sentence: no note of jax, no other error before.
        assert error.__cause__ is None, name
        assert len(str(error).strip().splitlines()) <= 2, name
        if name != IN_JIT:  # jax notes what passes through it
            assert not getattr(error, "__notes__", []), name
            assert error.__context__ is None or error.__suppress_context__, name


def test_an_optimizer_that_clips_updates_says_where_clipping_is_done(start):
    tx = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match="is the first transform of the chain"):
        start(tx=tx)


def test_a_missing_config_file_is_named(tmp_path, start):
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml does not exist"):
        start(str(tmp_path / "absent.yaml"))


# Folders and budgets.


def test_an_nvme_folder_of_others_is_left_alone(tmp_path, start):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        start(on_nvme(path), batch=draw())
    with pytest.raises(StorageError, match=r"such as 'file'"):
        start(on_nvme(tmp_path), batch=draw())
    assert path.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("free", "settings", "error", "message"),
    [
        # By the plan if the budget is what is free, else by the store.
        (1000, {}, ValueError, r"950.*[0-9],[0-9]{3}.* bytes"),
        (1000, {"nvme_capacity": "1GiB"}, StorageError, r"1,000.* bytes"),
        (0, {}, StorageError, "no free bytes"),
    ],
)
def test_a_drive_that_is_too_small_is_refused_with_numbers(
    free, settings, error, message, monkeypatch, tmp_path, start
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    config = on_nvme(tmp_path / "nvme")
    config["memory"] |= settings
    with pytest.raises(error, match=message):
        start(config, batch=draw())


@pytest.mark.slow
def test_state_that_fits_nowhere_is_refused_with_numbers(start):
    memory = {"device": "1KiB", "host": "1KiB"}
    with pytest.raises(ValueError, match=r"1,024 bytes.*at least [0-9,]+"):
        start({"memory": memory}, batch=draw())


# Calls that look odd.


def test_none_is_an_empty_part_of_the_parameters(start):
    engine = start(params={**init(), "unused": None}, batch=draw())
    engine.step(draw())
    assert engine.params()["unused"] is None


def test_a_model_that_is_frozen_whole_stays_as_it_is(start):
    engine = start({"frozen": ["*"]}, batch=draw())
    engine.step(draw())
    chex.assert_trees_all_equal(engine.params(), init(), strict=True)


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
    def loss(params, batch):
        return loss_fn(params, batch) * batch.get("scale", 2.0)

    engine, usual = start(loss=loss), start(loss=loss)
    assert engine.step(batch)["loss"] == usual.step(draw())["loss"]
    chex.assert_trees_all_equal(engine.params(), usual.params(), strict=True)


def test_an_engine_after_close_is_refused_not_begun_anew(start):
    engine = start(batch=draw())
    engine.step(draw())
    engine.close()
    uses = {
        "step": lambda: engine.step(draw()),
        "evaluate": lambda: engine.evaluate(draw()),
        "params": engine.params,
        "get": lambda: engine.get("out"),
        "restore": lambda: engine.restore("anywhere"),
    }
    for use in uses.values():
        with pytest.raises(RuntimeError, match="was closed"):
            use()
    engine.close()


# Errors of the loss itself.


def test_an_error_of_the_loss_is_its_own_and_names_the_batch(start):
    def loss(params, batch):
        try:
            return batch["inputs"]
        except KeyError:
            raise LookupError("no inputs")  # noqa: B904

    with pytest.raises(LookupError, match="no inputs") as caught:
        start(loss=loss, batch=draw())
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    # Below zinf's call of the trace comes the user's function, and nothing else.
    assert frames[-1] == "loss"
    assert "in_modes" not in frames
    (note,) = [n for n in caught.value.__notes__ if "loss_fn raised this" in n]
    assert "x float32[4, 8], y float32[4, 8]" in note
    # What the error came from is shown.
    assert "KeyError" in "".join(traceback.format_exception(caught.value))


def test_a_dtype_that_the_batch_alone_has_is_explained(start):
    def loss(params, batch):
        return jax.lax.concatenate([batch["x"], params["layers"][0]["w"]], 0).sum()

    with pytest.raises(TypeError, match="float32, bfloat16") as caught:
        start({"bf16": {"enabled": True}}, loss=loss, batch=draw())
    note = caught.value.__notes__[-1]
    assert "With bf16 enabled" in note and "x is float32" in note


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
