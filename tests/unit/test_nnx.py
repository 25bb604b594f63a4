import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.marks import slow_except
from zinf import Engine

DIM, SAMPLES, STEPS = 6, 8, 4
STREAMED_FROM_HOST = {
    "execution": "streamed",
    "segment": {"remat": "always"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}


class Net(nnx.Module):
    """Batch statistics, dropout from the module's own streams, a layer used twice."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.reused = self.linear
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.reused(self.dropout(nnx.tanh(self.linear(self.norm(x)))))


def create():
    return Net(rngs=nnx.Rngs(0))


def loss(module, batch):
    return jnp.mean(jnp.square(module(batch["x"]) - batch["y"]))


def batches(num=STEPS):
    random = np.random.default_rng(0)
    shape = 2, num, SAMPLES, DIM
    xs, ys = random.standard_normal(shape, np.float32)
    return [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]


def flat(module, *filters):
    leaves = nnx.to_pure_dict(nnx.state(module, *filters))
    leaves = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, leaves)
    return {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(leaves)}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def train_in_flax(module, tx):
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(module, batch)
        optimizer.update(module, grads)
        return value

    return [float(step(module, optimizer, b)) for b in batches()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [{"execution": "fused"}, STREAMED_FROM_HOST])
@pytest.mark.parametrize(
    "is_given", slow_except([True], [False, True]), ids=["function", "module"]
)
def test_training_is_that_of_a_plain_nnx_loop(is_given, config):
    # SGD, so that rounding stays rounding; 1e-5 is some hundred float32 roundings.
    tx = optax.sgd(0.1)
    expected_module = create()
    expected = train_in_flax(expected_module, tx)
    source = create() if is_given else create
    engine = zinf.nnx.initialize(loss, source, tx, config)
    losses = [engine.step(b)["loss"] for b in batches()]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    module = engine.update_module()
    found, wanted = flat(module), flat(expected_module)
    assert "['dropout']['rngs']['count']" in found
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert module.reused is module.linear
    engine.close()


def test_a_given_module_changes_only_when_it_is_updated():
    module = create()
    before = flat(module)
    engine = zinf.nnx.initialize(loss, module, optax.sgd(0.1), {"execution": "fused"})
    assert isinstance(engine, Engine)
    engine.step(batches()[0])
    chex.assert_trees_all_equal(flat(module), before, strict=True)
    assert engine.update_module() is module
    kernel = module.linear.kernel[...]
    assert isinstance(kernel, jax.Array)
    assert not np.array_equal(kernel, before["['linear']['kernel']"])
    engine.close()


def test_a_module_can_be_had_before_the_first_batch():
    module = create()
    before = flat(module)
    engine = zinf.nnx.initialize(loss, module, optax.sgd(0.1))
    chex.assert_trees_all_equal(flat(engine.update_module()), before, strict=True)


def test_state_and_random_streams_come_back_from_a_checkpoint(tmp_path):
    def start():
        config = {"execution": "fused"}
        return zinf.nnx.initialize(loss, create, optax.adam(0.1), config)

    engine = start()
    for batch in batches()[:2]:
        engine.step(batch)
    engine.save(tmp_path / "saved")
    expected = [engine.step(b)["loss"] for b in batches()[2:]]
    resumed = start()
    resumed.restore(tmp_path / "saved")
    assert [resumed.step(b)["loss"] for b in batches()[2:]] == expected


class Adapted(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.base = nnx.Linear(DIM, DIM, rngs=rngs)
        self.lora = nnx.LoRA(DIM, 2, DIM, rngs=rngs)

    def __call__(self, x):
        return self.base(x) + self.lora(x)


def test_parameters_outside_wrt_are_frozen():
    module = Adapted(rngs=nnx.Rngs(0))
    before = flat(module)
    engine = zinf.nnx.initialize(
        loss, module, optax.adam(0.1), {"execution": "fused"}, wrt=nnx.LoRAParam
    )
    for batch in batches():
        engine.step(batch)
    after = flat(engine.update_module())
    for name in before:
        assert np.array_equal(after[name], before[name]) == name.startswith("['base']")


@pytest.mark.slow
def test_each_microbatch_draws_masks_of_its_own():
    def kept(module, batch):
        mask = module.dropout(batch["x"])
        return jnp.mean(module.linear(mask)), mask != 0

    engine = zinf.nnx.initialize(
        kept,
        create,
        optax.sgd(0.1),
        {"execution": "fused", "gradient_accumulation_steps": 2},
        has_aux=True,
    )
    batch = {"x": np.ones((4, DIM), np.float32)}
    masks = np.concatenate([engine.step(batch)["aux"] for _ in range(3)])
    assert len({mask.tobytes() for mask in masks}) == 6
    module = engine.update_module()
    assert module.dropout.rngs.count[...] == 3
    assert module.dropout.rngs.key[...] == create().dropout.rngs.key[...]


def test_the_loss_takes_a_key_and_returns_aux_on_demand():
    def noisy(module, batch, key):
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return jnp.mean(module.linear(batch["x"] * mask)), mask

    engine = zinf.nnx.initialize(
        noisy,
        create,
        optax.sgd(0.1),
        {"execution": "fused"},
        has_aux=True,
        rng=jax.random.key(5),
    )
    (batch,) = batches(1)
    mask = engine.step(batch)["aux"]
    key = jax.random.fold_in(jax.random.key(5), 0)
    np.testing.assert_array_equal(mask, jax.random.bernoulli(key, 0.5, mask.shape))


class Remembering(nnx.Module):
    """Keeps activations for whoever looks, as models with probes do."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        self.seen = nnx.Intermediate(x)
        return self.linear(x)


def test_variables_that_the_loss_adds_are_not_kept():
    module = Remembering(rngs=nnx.Rngs(0))
    engine = zinf.nnx.initialize(loss, module, optax.sgd(0.1), {"execution": "fused"})
    engine.step(batches()[0])
    assert not hasattr(engine.update_module(), "seen")


def overwrite(module, batch):
    module.linear.bias[...] = jnp.ones(DIM)
    return loss(module, batch)


@pytest.mark.parametrize(
    ("loss_fn", "has_aux", "message"),
    [
        (overwrite, False, "changed the parameter 'linear/bias'"),
        (loss, True, r"must return \(loss, aux\)"),
        (lambda m, b: (loss(m, b), 1), False, "must return one floating-point number"),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused(loss_fn, has_aux, message):
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=message):
        zinf.nnx.initialize(loss_fn, create, tx, has_aux=has_aux, batch=batches()[0])


def test_the_order_of_arguments_before_is_refused_with_the_one_of_now():
    tx = optax.sgd(0.1)
    for module in (create, create()):
        with pytest.raises(ValueError, match=r"takes \(loss_fn, module, tx, config\)"):
            zinf.nnx.initialize(module, tx, loss)
