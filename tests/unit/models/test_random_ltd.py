"""A layer on some tokens does what it says, whatever its arguments are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.models import GPTConfig, init_and_loss

B, T, D, K = 3, 8, 4, 5


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


def positions() -> jax.Array:
    return zinf.sample_kept(jax.random.key(1), rows=B, length=T, kept=K)


def attend(x, mask, segments, table):
    """Attention with a mask, segment ids and a table of positions."""
    scores = jnp.einsum("btd,bsd->bts", x + table, x + table)
    same = segments[:, :, None] == segments[:, None, :]
    weights = jnp.where(mask[:, 0] & same, scores, -1e9)
    return x + jax.nn.softmax(weights) @ x


def inputs():
    mask = jnp.tril(jnp.ones((T, T), bool))[None, None]
    segments = jnp.asarray(np.arange(B * T).reshape(B, T) // 3)
    return draw(B, T, D), mask, segments, draw(1, T, D)


DIMS = {1: (2, 3), 2: 1, 3: 1}


def by_hand(x, kept, mask, segments, table):
    """The same, a row at a time, with NumPy's indexing."""
    result = np.array(x)
    for row, places in enumerate(np.asarray(kept)):
        own = attend(
            x[row : row + 1, places],
            mask[:, :, places][..., places],
            segments[row : row + 1, places],
            table[:, places],
        )
        result[row, places] = own[0]
    return result


def test_masks_segments_and_positions_are_those_of_the_kept_tokens():
    x, *rest = inputs()
    kept = positions()
    found = zinf.random_ltd(attend, kept, dims=DIMS)(x, *rest)
    np.testing.assert_allclose(found, by_hand(x, kept, *rest), rtol=1e-6)
    for row in range(B):
        passed = np.setdiff1d(np.arange(T), kept[row])
        assert (found[row, passed] == x[row, passed]).all()


def test_one_choice_for_all_rows_takes_masks_without_rows():
    x, mask, segments, table = inputs()
    kept = positions()[0]
    dims = {"mask": (0, 1), "segments": 1, "table": 0}

    def without_rows(x, mask, segments, table):
        return attend(x, mask[None, None], segments, table[None])

    layer = zinf.random_ltd(without_rows, kept, dims=dims)
    found = layer(x, mask=mask[0, 0], segments=segments, table=table[0])
    expected = by_hand(x, jnp.stack([kept] * B), mask, segments, table)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_all_tokens_kept_is_the_layer_exactly():
    assert zinf.random_ltd(attend, None, dims=DIMS) is attend
    x, *rest = inputs()
    kept = jnp.broadcast_to(jnp.arange(T), (B, T))
    found = zinf.random_ltd(attend, kept, dims=DIMS)(x, *rest)
    assert (found == attend(x, *rest)).all()


def test_gradients_reach_kept_tokens_through_the_layer_and_others_past_it():
    x, kept = draw(B, T, D), positions()

    def loss(x, layer):
        return jnp.sum(zinf.random_ltd(layer, kept)(x) ** 2)

    found = jax.grad(loss)(x, lambda x: 3 * x)
    is_kept = np.zeros((B, T, 1), bool)
    np.put_along_axis(is_kept, np.asarray(kept)[..., None], True, axis=1)
    np.testing.assert_allclose(found, np.where(is_kept, 18 * x, 2 * x), rtol=1e-6)


def test_of_a_tuple_the_first_is_put_back_and_the_rest_returned():
    x, kept = draw(B, T, D), positions()
    found, length = zinf.random_ltd(lambda x: (-x, x.shape[1]), kept)(x)
    assert length == K
    assert (jnp.abs(found) == jnp.abs(x)).all()


def test_a_position_beyond_the_tokens_gives_nan_and_no_silence():
    x, kept = draw(B, T, D), positions().at[0, -1].set(T)
    assert jnp.isnan(zinf.random_ltd(lambda x: x, kept)(x)).any()


def test_each_token_is_as_likely_to_be_kept():
    for count in (1, T):
        found = zinf.sample_kept(jax.random.key(0), rows=2, length=T, kept=count)
        assert found.shape == (2, count) and found.dtype == jnp.int32
    kept = zinf.sample_kept(jax.random.key(0), rows=4000, length=T, kept=K)
    assert kept.shape == (4000, K) and (jnp.diff(kept, axis=1) > 0).all()
    # Binomial with 4000 draws of probability 5/8: five standard deviations are 153.
    counts = np.bincount(np.asarray(kept).ravel(), minlength=T)
    assert (np.abs(counts - 4000 * K / T) < 153).all()


def call(kept=None, dims=None, layer=lambda x, *_: x, x=None, more=()):
    kept = positions() if kept is None else kept
    x = draw(B, T, D) if x is None else x
    return zinf.random_ltd(layer, kept, dims=dims)(x, *more)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kept": jnp.zeros((B, T + 1), int)}, "names 9 tokens, but a row has 8"),
        ({"kept": jnp.zeros((B + 1, K), int)}, r"it must be integers \(3, kept\)"),
        ({"kept": jnp.zeros((B, K))}, "it must be integers"),
        ({"x": draw(T)}, r"must be \(rows, tokens, ...\)"),
        (
            {"more": [jnp.ones((1, T))]},
            r"Argument 1 has the shape \[1, 8\].*dims=\{1: \(1,\)\}",
        ),
        (
            {"more": [jnp.ones((1, 9))], "dims": {1: 1}},
            "says that dim 1 of argument 1 has the 8 tokens",
        ),
        (
            {"more": [jnp.ones((T, T))], "dims": {1: (0, 1)}},
            "give it a leading dim of 3 rows, or of 1",
        ),
        ({"dims": {"mask": 1}}, "'mask', which the layer was not called with"),
        ({"layer": lambda x: x[..., :2]}, r"returned the shape \[3, 5, 2\]"),
    ],
)
def test_what_cannot_be_shortened_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        call(**wrong)


@pytest.mark.parametrize(("rows", "kept"), [(1, 0), (1, 9)])
def test_a_number_of_tokens_that_a_row_does_not_have_is_refused(rows, kept):
    with pytest.raises(ValueError, match="Keep between 1 and 8"):
        zinf.sample_kept(jax.random.key(0), rows=rows, length=T, kept=kept)


def gpt(position: str, layers=(1, 2)) -> tuple:
    shape = {"num_layers": 4, "num_heads": 2, "embed_dim": 8, "max_length": T}
    config = GPTConfig(**shape, position=position, random_ltd_layers=layers)
    init, loss = init_and_loss(config, seed=0)
    return init, loss


TOKENS = np.arange(B * (T + 1)).reshape(B, T + 1)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_all_positions_kept_is_the_model_without_dropping(position):
    init, loss = gpt(position)
    params, loss = init(), jax.jit(loss)
    kept = np.broadcast_to(np.arange(T, dtype=np.int32), (B, 2, T))
    whole = loss(params, {"tokens": TOKENS})
    np.testing.assert_allclose(
        loss(params, {"tokens": TOKENS, "kept": kept}), whole, rtol=1e-6
    )
    fewer = loss(params, {"tokens": TOKENS, "kept": kept[:, :, ::2]})
    assert abs(float(fewer - whole)) > 1e-5


def test_a_token_that_no_layer_keeps_has_no_say_in_later_ones():
    """With every layer dropping it, no attention reads it."""
    init, loss = gpt("learned", layers=(0, 1, 2, 3))
    kept = np.broadcast_to(np.arange(1, T, dtype=np.int32), (1, 4, T - 1))
    tokens = np.arange(T + 1)[None]
    others = tokens.copy()
    others[0, 0] = 77
    grad = jax.jit(jax.value_and_grad(loss))
    losses, grads = zip(
        *(grad(init(), {"tokens": t, "kept": kept}) for t in (tokens, others)),
        strict=True,
    )
    # The gradient of the table of the last position, which comes from later tokens.
    table = [g["position_embedding"][T - 1] for g in grads]
    np.testing.assert_allclose(*table, rtol=1e-5)
    # The target of the first position does not change; its logits do.
    assert float(losses[0]) != float(losses[1])


@pytest.mark.slow
def test_a_streamed_step_of_the_shorter_layers_is_the_fused_one():
    """The layers that drop tokens are planned with their own bytes; losses agree."""
    init, loss = gpt("learned")
    kept = np.stack([np.asarray(positions())] * 2, axis=1)
    losses = []
    for execution in ("fused", "streamed"):
        settings = {"execution": execution}
        with zinf.initialize(loss, init, optax.adam(1e-2), settings) as engine:
            batch = {"tokens": TOKENS, "kept": kept}
            taken = [engine.step(batch)["loss"] for _ in range(3)]
            losses.append([*taken, engine.evaluate({"tokens": TOKENS})])
    # float32 sums of a few hundred terms in another order.
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]
