"""Promises of `zinf.models.gpt`, on models of a few thousand parameters."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from zinf.core.optim.decision import NonFiniteError
from zinf.models import GPT, GPTConfig, init_and_loss, next_token_loss, num_parameters
from zinf.models.gpt_layers import Block, rope_tables, rotate

GPT2 = GPTConfig(num_layers=2, num_heads=4, embed_dim=16, max_length=12, vocab_size=32)
LLAMA = dataclasses.replace(
    GPT2,
    num_kv_heads=2,
    mlp_dim=24,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    tied_embeddings=False,
    use_bias=False,
)
BF16 = jnp.dtype("bfloat16")
STYLES = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


class Compiled(NamedTuple):
    """A model as jitted functions: op by op, each of them would compile for itself."""

    params: Any  # not those of `init`, whose biases are zero and guesses uniform
    loss: Callable[..., jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]


@functools.cache
def compiled(config: GPTConfig) -> Compiled:
    init, loss = init_and_loss(config, seed=0)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return Compiled(
        jax.tree.map(
            lambda leaf: 0.5 * rng.standard_normal(leaf.shape, "f"),
            jax.eval_shape(init),
        ),
        jax.jit(loss),
        jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens)),
    )


@functools.cache
def initial(config: GPTConfig) -> Any:
    return jax.tree.map(np.asarray, jax.jit(init_and_loss(config, seed=0)[0])())


def tokens(length: int = GPT2.max_length) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, GPT2.vocab_size, (2, length), np.int32)


def batch() -> dict[str, np.ndarray]:
    return {"tokens": tokens(GPT2.max_length + 1)}


def paths(params: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]


@STYLES
def test_a_token_changes_the_logits_from_its_place_on(config: GPTConfig) -> None:
    model, before = compiled(config), tokens()
    after = before.copy()
    after[:, 5] = (after[:, 5] + 1) % config.vocab_size
    logits = [model.logits(model.params, t) for t in (before, after)]
    assert logits[0].shape == (2, 12, config.vocab_size)
    assert logits[0].dtype == jnp.float32
    changed = np.any(np.asarray(logits[0] != logits[1]), axis=-1)
    assert not changed[:, :5].any()
    assert changed[:, 5:].all()
    # The order of earlier tokens matters.
    swapped = np.tile(before[:1], (2, 1))
    swapped[1, :2] = swapped[1, 1::-1]
    last = model.logits(model.params, swapped)[:, -1]
    assert not np.allclose(last[0], last[1], atol=1e-3)


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    # Weights of 0.02 leave the logits near zero: the loss is near log(vocab_size).
    value = compiled(LLAMA).loss(initial(LLAMA), batch())
    assert value == pytest.approx(math.log(LLAMA.vocab_size), rel=0.02)


def test_loss_is_the_mean_cross_entropy_of_the_following_tokens() -> None:
    model, inputs, targets = compiled(GPT2), tokens(13)[:, :-1], tokens(13)[:, 1:]
    logits = np.asarray(model.logits(model.params, inputs), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    one_hot = np.eye(GPT2.vocab_size)[targets]
    expected = -np.mean(np.sum(one_hot * log_probabilities, axis=-1))
    np.testing.assert_allclose(model.loss(model.params, batch()), expected, rtol=1e-6)


def test_what_the_model_cannot_know_is_nan_or_refused() -> None:
    foreign = tokens(13)
    foreign[0, 3] = GPT2.vocab_size
    assert np.isnan(compiled(GPT2).loss(compiled(GPT2).params, {"tokens": foreign}))
    with pytest.raises(ValueError, match="13 tokens but max_length is 12"):
        compiled(GPT2).logits(compiled(GPT2).params, tokens(13))


def test_rotated_scores_depend_on_the_distance_only() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 1, 8), "f")
    rope = rope_tables(6, 8)
    rotated = [rotate(jnp.tile(x, (1, 6, 1, 1)), rope)[0, :, 0] for x in (query, key)]
    scores = np.asarray(rotated[0] @ rotated[1].T)
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert np.ptp(scores[:, 0]) > 0.1
    # Position 0 is not rotated, and no position changes a vector's length.
    np.testing.assert_array_equal(rotated[0][0], query[0, 0, 0])
    lengths = np.linalg.norm(rotated[0], axis=-1)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-6)


def test_grouped_heads_equal_repeated_key_and_value_heads() -> None:
    grouped, full = LLAMA, dataclasses.replace(LLAMA, num_kv_heads=None)
    dim, heads = grouped.embed_dim, (grouped.embed_dim, 2, grouped.head_dim)
    params = jax.tree.map(np.asarray, compiled(grouped).params)
    for block in params["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"].reshape(heads)
            repeated = np.repeat(kernel, 2, axis=1).reshape(dim, -1)
            block["attention"][name]["kernel"] = repeated
    expected = compiled(grouped).loss(compiled(grouped).params, batch())
    actual = compiled(full).loss(params, batch())
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_residual_projections_start_smaller_by_the_root_of_their_number() -> None:
    config = dataclasses.replace(GPT2, num_layers=8, embed_dim=32, scan_layers=True)
    blocks = initial(config)["blocks"]
    # Of 8 * 32 * 32 samples or more, the spread is known to 1 / sqrt(2 * 8192) = 0.8%.
    for kernel, stddev in (
        (blocks["attention"]["query"]["kernel"], 0.02),
        (blocks["mlp"]["up"]["kernel"], 0.02),
        (blocks["attention"]["out"]["kernel"], 0.02 / math.sqrt(2 * 8)),
        (blocks["mlp"]["down"]["kernel"], 0.02 / math.sqrt(2 * 8)),
    ):
        assert np.std(kernel) == pytest.approx(stddev, rel=0.03)


def test_key_paths_name_each_parameter_by_its_place() -> None:
    names = set(paths(compiled(GPT2).params))
    assert {"token_embedding", "position_embedding", "norm/scale"} < names
    assert {"blocks/1/attention/query/kernel", "blocks/0/mlp/down/bias"} < names
    assert "output_embedding" in paths(compiled(LLAMA).params)


@STYLES
def test_stacked_and_separate_layers_give_the_same_loss(config: GPTConfig) -> None:
    separate = dataclasses.replace(config, dropout=0.5)
    stacked = dataclasses.replace(separate, scan_layers=True)
    params = compiled(separate).params
    blocks = [params["blocks"][layer] for layer in range(2)]
    stacked_params = params | {"blocks": jax.tree.map(lambda *x: np.stack(x), *blocks)}
    args = (batch(), jax.random.key(7))
    np.testing.assert_allclose(
        compiled(stacked).loss(stacked_params, *args),
        compiled(separate).loss(params, *args),
        rtol=1e-6,
    )


def test_stacked_and_separate_layers_start_equal() -> None:
    separate = initial(GPT2)["blocks"]
    stacked = initial(dataclasses.replace(GPT2, scan_layers=True))["blocks"]
    expected = jax.tree.map(lambda *x: np.stack(x), separate[0], separate[1])
    chex.assert_trees_all_close(stacked, expected, rtol=1e-6)
    kernel = stacked["mlp"]["up"]["kernel"]
    assert np.any(kernel[0] != kernel[1])


@STYLES
def test_gradients_are_finite_and_reach_every_parameter(config: GPTConfig) -> None:
    model = compiled(config)
    gradients = jax.jit(jax.grad(model.loss))(model.params, batch())
    chex.assert_tree_all_finite(gradients)
    for path, grad in zip(paths(gradients), jax.tree.leaves(gradients), strict=True):
        # A key bias moves all scores of a query alike, and softmax ignores that.
        if not path.endswith("key/bias"):
            assert np.any(grad != 0), path


@STYLES
def test_bfloat16_parameters_compute_in_bfloat16(config: GPTConfig) -> None:
    model = compiled(config)
    half = jax.tree.map(lambda x: x.astype(BF16), model.params)
    value = model.loss(half, batch())
    # bfloat16 keeps 8 bits, and the loss averages 24 tokens.
    np.testing.assert_allclose(value, model.loss(model.params, batch()), rtol=0.02)
    assert value.dtype == jnp.float32
    gradients = jax.eval_shape(jax.grad(model.loss), half, batch())
    chex.assert_type(jax.tree.leaves(gradients), BF16)
    # Every matmul with a kernel reads and writes bfloat16; the last one writes logits.
    matmuls = [
        eqn
        for eqn in flat_eqns(jax.make_jaxpr(model.loss)(half, batch()).jaxpr)
        if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.ndim == 2
    ]
    dtypes = [{v.aval.dtype for v in (*e.invars, *e.outvars)} for e in matmuls]
    num_kernels = 7 if config.activation == "swiglu" else 6
    assert dtypes[:-1] == [{BF16}] * num_kernels * config.num_layers
    assert dtypes[-1] == {BF16, jnp.dtype("float32")}


def test_dropout_follows_its_key_and_is_off_without_one() -> None:
    dropped, plain = dataclasses.replace(GPT2, dropout=0.5), compiled(GPT2)
    loss = compiled(dropped).loss
    keys = jax.random.key(0), jax.random.key(0), jax.random.key(1)
    first, again, other = (loss(plain.params, batch(), key) for key in keys)
    assert first == again != other
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(dropped, rngs=nnx.Rngs(0))))
    evaluated = jax.jit(
        lambda params: next_token_loss(nnx.merge(graphdef, params), batch())
    )
    assert evaluated(plain.params) == plain.loss(plain.params, batch())


def flat_eqns(jaxpr: Any) -> Iterator[Any]:
    """Equations in order, those of called functions in place of the call."""
    for eqn in jaxpr.eqns:
        called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if called is None:
            yield eqn
        else:
            yield from flat_eqns(called.jaxpr)


def signatures(jaxpr: Any) -> list[tuple[Any, ...]]:
    """What makes equations the same code, whatever their scalar literals are."""
    return [
        (
            eqn.primitive.name,
            tuple(str(var.aval) for var in eqn.invars),
            tuple(str(var.aval) for var in eqn.outvars),
            str(sorted((k, str(v)) for k, v in eqn.params.items())),
        )
        for eqn in flat_eqns(jaxpr)
    ]


@pytest.mark.parametrize(("config", "dropout"), [(GPT2, 0.1), (LLAMA, 0.0)])
def test_all_layers_are_the_same_run_of_equations(
    config: GPTConfig, dropout: float
) -> None:
    runs = {}
    for num_layers in (4, 5):
        deep = dataclasses.replace(config, num_layers=num_layers, dropout=dropout)
        init, loss = init_and_loss(deep, seed=0)
        key = (jax.random.key(0),) if dropout else ()
        args = (jax.eval_shape(init), batch(), *key)
        runs[num_layers] = signatures(jax.make_jaxpr(loss)(*args).jaxpr)
    period = len(runs[5]) - len(runs[4])
    run = runs[4]
    longest = current = 0  # equations in a row that recur one layer later
    for earlier, later in zip(run, run[period:], strict=False):
        current = current + 1 if earlier == later else 0
        longest = max(longest, current)
    # Four equal layers agree with their successors over three whole layers.
    assert longest >= 3 * period
    assert period > 20


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_175b_model_is_described_by_one_layer_and_without_allocation(
    scan_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPTConfig(
        num_layers=96,
        num_heads=96,
        embed_dim=12288,
        vocab_size=50257,
        max_length=2048,
        scan_layers=scan_layers,
    )
    make, made = Block.__init__, []

    def counted(block: Block, *arguments: Any, **named: Any) -> None:
        made.append(block)
        make(block, *arguments, **named)

    monkeypatch.setattr(Block, "__init__", counted)
    init, _ = init_and_loss(config, seed=0)
    shapes = jax.eval_shape(init)
    jax.make_jaxpr(init)()
    # One block a trace takes 0.5 s, one for each layer took 40 s.
    assert len(made) == 2
    numel = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert numel == num_parameters(config)
    # 12 D^2 + 13 D per layer (4 attention and 2 MLP kernels, 2 norms, 6 biases), the
    # last norm, and the tables.
    dim = 12288
    assert numel == 96 * (12 * dim**2 + 13 * dim) + 2 * dim + (50257 + 2048) * dim


EXPERTS = dataclasses.replace(GPT2, num_experts=1)


def test_one_expert_that_takes_all_is_a_dense_mlp() -> None:
    params = initial(EXPERTS)
    dense = jax.tree.map(lambda x: x, params)
    for block in dense["blocks"].values():
        block["mlp"] = jax.tree.map(lambda w: w[0], block["mlp"]["experts"])
    # One expert has a balancing loss of one, whatever it is given.
    wanted = compiled(GPT2).loss(dense, batch()) + EXPERTS.aux_loss_coefficient
    found = compiled(EXPERTS).loss(params, batch())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.slow
def test_experts_larger_than_the_device_train_in_pieces(tmp_path) -> None:
    config = dataclasses.replace(GPT2, mlp_dim=1024, num_experts=8)
    one_layer = 8 * (2 * 16 * 1024 + 1024 + 16) * 4
    device = one_layer * 3 // 4
    memory = {"nvme": [str(tmp_path)], "device": device, "host": "8MiB"}

    def losses(splits: int, **memory) -> list[float]:
        split = dataclasses.replace(config, expert_splits=splits)
        init, loss = init_and_loss(split, seed=0)
        tx = optax.sgd(0.1)
        with zinf.initialize(loss, init, tx, {"memory": memory}) as engine:
            return [engine.step(batch())["loss"] for _ in range(2)]

    with pytest.raises(ValueError, match="The device budget is"):
        losses(1, **memory)
    np.testing.assert_allclose(losses(8, **memory), losses(1), rtol=1e-5)


@pytest.mark.slow
def test_nan_logits_of_a_router_are_an_error_and_no_update() -> None:
    init, loss = init_and_loss(dataclasses.replace(GPT2, num_experts=2), seed=0)

    def spoiled() -> Any:
        params = init()
        mlp = params["blocks"][0]["mlp"]
        mlp["router_kernel"] = mlp["router_kernel"].at[0, 0].set(jnp.nan)
        return params

    with zinf.initialize(loss, spoiled, optax.sgd(0.1)) as engine:
        with pytest.raises(NonFiniteError):
            engine.step(batch())
