import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.segment.problem import make_problem

CPU = jax.devices("cpu")[0]


def loss(params, batch):
    return jnp.mean(params["w"] * batch)


def stateful(change):
    def loss_fn(params, state, batch):
        return jnp.mean(params["w"] * batch), change(state)

    return loss_fn


def abstract_loss(problem):
    arguments = problem.abstract_arguments()
    return jax.eval_shape(problem.loss, arguments, jnp.ones(2))


def test_a_pytree_that_can_be_called_is_not_taken_for_an_init_function():
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    problem = make_problem(lambda m, x: m(x).sum(), model)
    assert set(problem.params) == {"weight", "bias"}
    assert isinstance(problem.abstract_params, eqx.nn.Linear)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_random_key_keeps_its_implementation(implementation):
    key = jax.random.key(3, impl=implementation)
    problem = make_problem(loss, {"w": jnp.ones(2), "key": key})
    stored = dict(problem.initial_leaves(CPU))
    assert stored["key"].dtype == np.uint32
    restored = problem.restore_tree(stored.__getitem__)["key"]
    assert restored == key
    assert jax.random.key_impl(restored) == jax.random.key_impl(key)


def test_complex_parameters_are_refused_unless_frozen():
    params = {"w": jnp.ones(2), "phase": jnp.ones(2, jnp.complex64)}
    with pytest.raises(NotImplementedError, match="'phase' is complex64"):
        make_problem(loss, params)
    problem = make_problem(loss, params, frozen=["phase"])
    assert problem.trainable == {"w"}


def test_model_state_may_come_from_a_function():
    problem = make_problem(
        stateful(lambda state: state),
        {"w": jnp.ones(2)},
        model_state=lambda: {"mean": jnp.zeros(3), "key": jax.random.key(1)},
    )
    stored = dict(problem.initial_leaves(CPU))
    state = problem.restore_state(stored.__getitem__)
    np.testing.assert_array_equal(state["mean"], np.zeros(3))
    assert state["key"] == jax.random.key(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"mean": s["mean"].astype(jnp.bfloat16)},
            r"'mean' as bfloat16\[3\]",
        ),
        (lambda s: {"mean": s["mean"][:2]}, r"'mean' as float32\[2\], but .*\[3\]"),
        (lambda s: {**s, "count": 1}, "with the structure of model_state"),
    ],
)
def test_model_state_may_not_change_its_shape_dtype_or_structure(change, message):
    state = {"mean": jnp.zeros(3)}
    problem = make_problem(stateful(change), {"w": jnp.ones(2)}, model_state=state)
    with pytest.raises(ValueError, match=message):
        abstract_loss(problem)


def test_aux_and_model_state_come_as_a_pair():
    problem = make_problem(
        lambda p, s, b: (jnp.mean(p["w"] * b), s),
        {"w": jnp.ones(2)},
        model_state={"mean": jnp.zeros(3)},
        has_aux=True,
    )
    with pytest.raises(ValueError, match=r"\(loss, \(new_model_state, aux\)\)"):
        abstract_loss(problem)
