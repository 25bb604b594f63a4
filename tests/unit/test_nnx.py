"""`zinf.nnx`: modules train as in the loop that Flax's documentation shows."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.tiers import streamed
from tests.unit.refusals import refusals
from zinf import Engine

DIM, SAMPLES, STEPS = 6, 8, 4
STREAMED_FROM_HOST = streamed("cpu")
FUSED = {"execution": "fused"}
# SGD, so that rounding stays rounding.
SGD = optax.sgd(0.1)


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
    # As models with probes do. Variables that the loss adds are not kept.
    module.probe = nnx.Intermediate(batch["x"])
    return jnp.mean(jnp.square(module(batch["x"]) - batch["y"]))


def batches(num=STEPS):
    random = np.random.default_rng(0)
    xs, ys = random.standard_normal((2, num, SAMPLES, DIM), np.float32)
    return [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]


def flat(module):
    leaves = nnx.to_pure_dict(nnx.state(module))
    leaves = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, leaves)
    return {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(leaves)}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def trained_in_flax():
    module = create()
    optimizer = nnx.Optimizer(module, SGD, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(module, batch)
        optimizer.update(module, grads)
        return value

    losses = [float(step(module, optimizer, b)) for b in batches()]
    del module.probe
    return losses, module


@pytest.mark.parametrize(
    ("config", "is_given"),
    [(FUSED, True), (STREAMED_FROM_HOST, False)],
    ids=["fused, a module", "streamed, a function"],
)
def test_training_is_that_of_a_plain_nnx_loop(config, is_given, tmp_path):
    expected, wanted = trained_in_flax()
    source = create() if is_given else create
    engine = zinf.nnx.initialize(loss, source, SGD, config)
    assert isinstance(engine, Engine)
    before = flat(create())
    # A module can be had before the first batch.
    # A function is compiled leaf by leaf, which rounds in other places.
    rest = {"rtol": 0, "atol": 0} if is_given else {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(flat(engine.update_module()), before, **rest)
    losses = [engine.step(b)["loss"] for b in batches()[:2]]
    engine.save(tmp_path / "saved")
    losses += [engine.step(b)["loss"] for b in batches()[2:]]
    # 1e-5 is some hundred float32 roundings.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if is_given:
        # The given module changes only when it is updated.
        chex.assert_trees_all_equal(flat(source), before, strict=True)
    module = engine.update_module()
    assert (module is source) == is_given
    assert isinstance(module.linear.kernel[...], jax.Array)
    assert "['dropout']['rngs']['count']" in flat(module)
    chex.assert_trees_all_close(flat(module), flat(wanted), rtol=1e-5, atol=1e-6)
    assert module.reused is module.linear
    assert not hasattr(module, "probe")
    # State and random streams come back from a checkpoint.
    resumed = zinf.nnx.initialize(loss, create, SGD, config)
    resumed.restore(tmp_path / "saved")
    assert [resumed.step(b)["loss"] for b in batches()[2:]] == losses[2:]
    engine.close()
    resumed.close()


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
        loss, module, optax.adam(0.1), FUSED, wrt=nnx.LoRAParam
    )
    for batch in batches():
        engine.step(batch)
    after = flat(engine.update_module())
    for name in before:
        assert np.array_equal(after[name], before[name]) == name.startswith("['base']")


def test_each_microbatch_draws_masks_of_its_own():
    def kept(module, batch):
        mask = module.dropout(batch["x"])
        return jnp.mean(module.linear(mask)), mask != 0

    config = {**FUSED, "gradient_accumulation_steps": 2}
    engine = zinf.nnx.initialize(kept, create, SGD, config, has_aux=True)
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

    rest = {"has_aux": True, "rng": jax.random.key(5)}
    engine = zinf.nnx.initialize(noisy, create, SGD, FUSED, **rest)
    mask = engine.step(batches()[0])["aux"]
    key = jax.random.fold_in(jax.random.key(5), 0)
    np.testing.assert_array_equal(mask, jax.random.bernoulli(key, 0.5, mask.shape))


def overwrite(module, batch):
    module.linear.bias[...] = jnp.ones(DIM)
    return loss(module, batch)


def test_arguments_that_cannot_be_right_are_refused(golden):
    def start(loss_fn, module=create, tx=SGD, **rest):
        return lambda: zinf.nnx.initialize(
            loss_fn, module, tx, batch=batches()[0], **rest
        )

    cases = {
        "a loss that changes a parameter": start(overwrite),
        "has_aux, and the loss alone": start(lambda m, b: 1.0, has_aux=True),
        "aux without has_aux": start(lambda m, b: (loss(m, b), 1)),
        "the module first": start(create(), SGD, loss),
        "a function of the module first": start(create, SGD, loss),
    }
    golden.check("nnx_refusals.txt", refusals(cases))


class Wrapped(Net):
    """`Net` through transforms of NNX, which return the modules that they take."""

    def __call__(self, x):
        x = nnx.jit(lambda norm, x: norm(x))(self.norm, x)
        h = nnx.remat(lambda linear, x: nnx.tanh(linear(x)))(self.linear, x)
        is_wide = x.shape[0] > 1
        h = nnx.cond(is_wide, lambda d, h: d(h), lambda d, h: h, self.dropout, h)
        return nnx.jit(nnx.remat(lambda linear, h: linear(h)))(self.reused, h)


@pytest.mark.parametrize("config", [STREAMED_FROM_HOST, FUSED])
def test_modules_that_transforms_return_are_not_changed(config):
    """Losses and statistics are those without the transforms."""

    def train(module):
        engine = zinf.nnx.initialize(loss, module, SGD, config)
        losses = [engine.step(batch)["loss"] for batch in batches(3)]
        return losses, flat(engine.update_module())

    plain, wrapped = train(create()), train(Wrapped(rngs=nnx.Rngs(0)))
    chex.assert_trees_all_close(wrapped, plain, rtol=1e-5, atol=1e-6)


def test_a_change_inside_a_transform_is_refused():
    @nnx.remat
    def overwrite_inside(linear, x):
        linear.bias[...] = linear.bias[...] + 1
        return linear(x)

    def changing(module, batch):
        return jnp.mean(overwrite_inside(module.linear, batch["x"]))

    with pytest.raises(ValueError, match="changed the parameter 'linear/bias'"):
        zinf.nnx.initialize(changing, create, SGD, FUSED, batch=batches()[0])


class Bigram(nnx.Module):
    """A model that says how it decodes and scores: `zinf.nnx.Decodes`."""

    max_length, like_cache = 8, "table"

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (DIM, DIM)))

    def init_cache(self, starts, length, *, dtype):
        return {"starts": starts, "unused": jnp.zeros((len(starts), length), dtype)}

    def decode(self, tokens, cache):
        return self.table[tokens[:, -1]], cache

    def token_scores(self, batch):
        logits = jax.nn.log_softmax(self.table[batch["tokens"][:, :-1]])
        return jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], 2)[..., 0]


def test_a_module_that_says_how_it_decodes_generates_and_is_scored():
    def loss(module, batch):
        return -module.token_scores(batch).mean()

    batch = {"tokens": np.arange(2 * DIM, dtype=np.int32).reshape(2, DIM) % DIM}
    module = Bigram(rngs=nnx.Rngs(0))
    table = np.asarray(module.table[...])
    with zinf.nnx.initialize(loss, module, SGD, FUSED, batch=batch) as engine:
        [found] = engine.generate([[3, 1]], max_new_tokens=4)
        scores = engine.log_probabilities(batch)
    wanted = [1]
    for _ in found:
        wanted.append(int(table[wanted[-1]].argmax()))
    assert found == wanted[1:]
    probabilities = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    expected = np.log(probabilities)[batch["tokens"][:, :-1], batch["tokens"][:, 1:]]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
