"""What the user gives becomes a problem with named leaves, or is refused."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.refusals import refusals
from zinf.core.problem import problem
from zinf.core.problem.user_loss import UserLoss

CPU = jax.devices("cpu")[0]
W = {"w": jnp.ones(2)}
MEAN = {"mean": jnp.zeros(3)}


def make_problem(loss_fn, params, *, has_aux=False, model_state=None, **rest):
    user = UserLoss(loss_fn, params, has_aux, model_state=model_state)
    return problem.make_problem(user, **rest)


def loss(params, batch):
    return jnp.mean(params["w"] * batch)


def stateful(change=lambda state: state):
    return lambda params, state, batch: (jnp.mean(params["w"] * batch), change(state))


def abstract_loss(problem):
    return jax.eval_shape(problem.loss, problem.abstract_arguments(), jnp.ones(2))


def test_a_pytree_that_can_be_called_is_not_taken_for_an_init_function():
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    problem = make_problem(lambda m, x: m(x).sum(), model)
    assert set(problem.params) == {"weight", "bias"}
    assert isinstance(problem.abstract_params, eqx.nn.Linear)


def test_the_tree_that_was_stored_is_the_tree_that_was_given():
    def init():
        return {
            "layers": [{"w": jnp.arange(4.0)}, {"w": jnp.ones((2, 2))}],
            "pair": (jnp.int32(3), None),
            "keys": jax.random.split(jax.random.key(1), 3),
            "rbg": jax.random.key(3, impl="rbg"),
        }

    problem = make_problem(loss, init())
    stored = dict(problem.initial_leaves(CPU))
    assert all(isinstance(x, np.ndarray) for x in stored.values())
    assert stored["keys"].dtype == stored["rbg"].dtype == np.uint32
    assert all(x.shape == problem.params[p].master.shape for p, x in stored.items())
    restored, wanted = problem.restore_tree(stored.__getitem__), init()
    chex.assert_trees_all_equal(restored, wanted, strict=True)
    assert jax.random.key_impl(restored["rbg"]) == jax.random.key_impl(wanted["rbg"])
    assert problem.restore_state(stored.__getitem__) is None


def test_model_state_may_come_from_a_function_and_is_never_trained():
    def state():
        return {**MEAN, "key": jax.random.key(1)}

    problem = make_problem(stateful(), W, model_state=state, compute_dtype="bfloat16")
    stored = dict(problem.initial_leaves(CPU))
    found = problem.restore_state(stored.__getitem__)
    chex.assert_trees_all_equal(found, state(), strict=True)
    spec = problem.params["model_state/mean"]
    assert spec.master.dtype == spec.compute.dtype == jnp.float32
    assert set(problem.state_paths) == {"model_state/mean", "model_state/key"}
    assert problem.trainable == {"w"}


MIXED = {
    "w": jnp.ones(2),
    "frozen": jnp.ones(3),
    "half": np.ones(2, np.float16),
    "ids": jnp.arange(3),
    "key": jax.random.key(0),
}
# Complex numbers may be frozen.
FROZEN = {**MIXED, "frozen_phase": jnp.ones(2, jnp.complex64)}


def dtypes_of(specs, kind):
    return {p: str(getattr(s, kind).dtype) for p, s in specs.items()}


def test_without_mixed_precision_leaves_keep_their_dtypes():
    specs = make_problem(loss, MIXED).params
    given = {p: str(x.dtype) for p, x in MIXED.items()} | {"key": "uint32"}
    assert dtypes_of(specs, "master") == dtypes_of(specs, "compute") == given
    assert not any(spec.has_master for spec in specs.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_float32_masters_of_trained_leaves_alone(dtype):
    seen = []

    def noting(params, batch):
        seen.append({p: str(x.dtype) for p, x in params.items()})
        return loss(params, batch)

    problem = make_problem(noting, FROZEN, frozen=["fro*"], compute_dtype=dtype)
    specs = problem.params
    whole = {"ids": "int32", "key": "uint32", "frozen_phase": "complex64"}
    halves = dict.fromkeys(("w", "frozen", "half"), dtype) | whole
    assert dtypes_of(specs, "compute") == halves
    masters = {"w": "float32", "frozen": dtype, "half": "float32"} | whole
    assert dtypes_of(specs, "master") == masters
    assert problem.trainable == {"w", "half"}
    assert {p for p, s in specs.items() if s.has_master} == {"w", "half"}
    arguments = problem.abstract_arguments()
    assert {p: str(a.dtype) for p, a in arguments.items()} == halves
    # The loss sees the tree that the user gave.
    abstract_loss(problem)
    assert seen[0] == halves | {"key": "key<fry>"}


def test_random_keys_in_auxiliary_outputs_come_as_words():
    problem = make_problem(
        lambda p, b: (loss(p, b), {"key": jax.random.key(0), "n": 3}), W, has_aux=True
    )
    _, extra = abstract_loss(problem)
    assert extra["aux"]["key"].dtype == jnp.uint32
    assert extra["model_state"] is None


def state_of(change):
    return lambda: abstract_loss(make_problem(stateful(change), W, model_state=MEAN))


def result_of(result, has_aux=True):
    problem = make_problem(lambda p, b: result, W, has_aux=has_aux)
    return lambda: abstract_loss(problem)


REFUSED = {
    "complex parameters": lambda: make_problem(
        loss, {**W, "phase": jnp.ones(2, jnp.complex64)}
    ),
    "a pattern that matches nothing": lambda: make_problem(
        loss, MIXED, frozen=["layers/*"]
    ),
    "no leaves": lambda: make_problem(loss, {}),
    "no array": lambda: make_problem(loss, {**W, "act": "tanh"}),
    "state of another dtype": state_of(
        lambda s: {"mean": s["mean"].astype("bfloat16")}
    ),
    "state of another shape": state_of(lambda s: {"mean": s["mean"][:2]}),
    "state of another structure": state_of(lambda s: {**s, "count": 1}),
    "state without a pair": lambda: abstract_loss(
        make_problem(stateful(), W, model_state=MEAN, has_aux=True)
    ),
    "no auxiliary output": result_of(3),
    "a tuple of one": result_of((1.0,)),
    "a tuple of three": result_of((1.0, 2.0, 3.0)),
    "a tuple without has_aux": result_of((1.0, 2.0), has_aux=False),
}


def test_each_refusal_says_why(golden):
    golden.check("refused_problems.txt", refusals(REFUSED))
