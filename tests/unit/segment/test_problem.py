import chex
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


def dtypes_of(specs, kind):
    return {p: str(getattr(s, kind).dtype) for p, s in specs.items()}


MIXED = {
    "w": jnp.ones(2),
    "frozen": jnp.ones(3),
    "half": np.ones(2, np.float16),
    "ids": jnp.arange(3),
    "key": jax.random.key(0),
}


def test_without_mixed_precision_leaves_keep_their_dtypes():
    specs = make_problem(loss, MIXED).params
    wanted = {
        "w": "float32",
        "frozen": "float32",
        "half": "float16",
        "ids": "int32",
        "key": "uint32",
    }
    assert dtypes_of(specs, "master") == dtypes_of(specs, "compute") == wanted
    assert not any(spec.has_master for spec in specs.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_float32_masters_of_trained_leaves_alone(dtype):
    problem = make_problem(loss, MIXED, frozen=["fro*"], compute_dtype=dtype)
    specs = problem.params
    masters, computes = dtypes_of(specs, "master"), dtypes_of(specs, "compute")
    assert [masters[p] for p in ("w", "frozen", "half")] == [
        "float32",
        dtype,
        "float32",
    ]
    assert {computes[p] for p in ("w", "frozen", "half")} == {dtype}
    assert masters["ids"] == computes["ids"] == "int32"
    assert problem.trainable == {"w", "half"}
    assert {p for p, s in specs.items() if s.has_master} == {"w", "half"}
    arguments = problem.abstract_arguments()
    assert list(arguments) == list(specs)
    assert {p: str(a.dtype) for p, a in arguments.items()} == computes


def test_model_state_is_never_trained_and_keeps_its_dtype():
    problem = make_problem(
        stateful(lambda s: s),
        {"w": jnp.ones(2)},
        model_state={"mean": jnp.zeros(3)},
        compute_dtype="bfloat16",
    )
    spec = problem.params["model_state/mean"]
    assert problem.state_paths == ("model_state/mean",)
    assert spec.master.dtype == spec.compute.dtype == jnp.float32
    assert problem.trainable == {"w"}


def test_a_frozen_pattern_that_matches_nothing_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"no parameter matches 'layers/\*'.*\bw\b"):
        make_problem(loss, MIXED, frozen=["layers/*"])


def test_a_tree_without_leaves_is_refused():
    with pytest.raises(ValueError, match="has no leaves"):
        make_problem(loss, {})


def test_a_leaf_that_is_no_array_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'act'.*not an array"):
        make_problem(loss, {"w": jnp.ones(2), "act": jnp.tanh})


@pytest.mark.parametrize("from_function", [False, True])
def test_the_tree_that_was_stored_is_the_tree_that_was_given(from_function):
    def init():
        return {
            "layers": [{"w": jnp.arange(4.0)}, {"w": jnp.ones((2, 2))}],
            "pair": (jnp.int32(3), None),
            "keys": jax.random.split(jax.random.key(1), 3),
        }

    problem = make_problem(loss, init if from_function else init())
    stored = dict(problem.initial_leaves(CPU))
    assert all(isinstance(x, np.ndarray) for x in stored.values())
    assert {p: x.shape for p, x in stored.items()} == {
        p: s.master.shape for p, s in problem.params.items()
    }
    restored, wanted = problem.restore_tree(stored.__getitem__), init()
    chex.assert_trees_all_equal(restored, wanted, strict=True)
    assert problem.restore_state(stored.__getitem__) is None


def test_the_loss_sees_the_tree_that_the_user_gave():
    seen = []

    def loss_fn(params, batch):
        seen.append(jax.tree.map(lambda x: str(x.dtype), params))
        return jnp.mean(params["w"] * batch)

    abstract_loss(make_problem(loss_fn, MIXED, compute_dtype="bfloat16"))
    assert seen[0]["w"] == "bfloat16"
    assert seen[0]["ids"] == "int32"
    assert seen[0]["key"] == "key<fry>"


@pytest.mark.parametrize("result", [3, (1.0,), (1.0, 2.0, 3.0)])
def test_a_result_without_the_auxiliary_output_is_refused(result):
    problem = make_problem(lambda p, b: result, {"w": jnp.ones(2)}, has_aux=True)
    with pytest.raises(ValueError, match=r"must return \(loss, aux\)"):
        abstract_loss(problem)


def test_a_tuple_without_has_aux_is_refused():
    problem = make_problem(lambda p, b: (1.0, b), {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="pass has_aux=True"):
        abstract_loss(problem)


def test_random_keys_in_auxiliary_outputs_come_as_words():
    problem = make_problem(
        lambda p, b: (jnp.mean(p["w"] * b), {"key": jax.random.key(0), "n": 3}),
        {"w": jnp.ones(2)},
        has_aux=True,
    )
    _, extra = abstract_loss(problem)
    assert extra["aux"]["key"].dtype == jnp.uint32
    assert extra["model_state"] is None
