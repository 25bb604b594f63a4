"""What a user's loss may contain: streamed gradients and losses are those of jax."""

from fnmatch import fnmatch

import chex
import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.programs import PROGRAMS, Program
from tests.equivalence.training import ON_HOST, streamed_config
from zinf.core.plan import Run
from zinf.core.program import ArrayId, Role
from zinf.core.segment import named_leaves

# Float32 sums of some thousand terms in another order differ by about 1e-6 of the
# largest: 1e-5 leaves room for a network's depth. What programs cast to bfloat16
# themselves is rounded to 2^-9 some eight times on its way through three layers.
TOLERANCE, BFLOAT16 = 1e-5, 2**-6
STEPS = 2
# One of each kind: keys, shared parameters, stacks, custom rules, loops, and what goes
# in and out.
FAST = {
    "dropout_with_microbatches",
    "frozen_leaves_of_several_kinds",
    "parameters_that_are_unused_or_without_entries",
    "scalars_and_a_matrix_in_every_layer",
    "stacks_of_stacks_numbers_and_integers",
    "custom_rules_in_every_layer",
    "loops_and_branches_in_every_layer",
    "an_encoder_and_a_decoder",
    "aux_outputs_of_all_kinds",
    "a_loss_without_a_gradient",
}
# The trace of momentum is the gradient itself after the first step.
TX = optax.sgd(0.1, momentum=0.9)
# Its programs compile several times as fast as those of the default.
KEY = jax.random.key(11, impl="unsafe_rbg")


def train_in_jax(program: Program, params):
    """`(gradients of the first step, losses)` with `jax.grad` and optax."""
    named = named_leaves(params)
    trained = {p: x for p, x in named.items() if p not in program.frozen}
    structure = jax.tree.structure(params)

    def loss_of(trained, i):
        leaves = [trained.get(p, x) for p, x in named.items()]
        return program.mean_loss(jax.tree.unflatten(structure, leaves), KEY, i)

    step = jax.jit(jax.value_and_grad(loss_of))
    state, losses, gradients = TX.init(trained), [], None
    for i in range(STEPS):
        loss, grads = step(trained, i)
        gradients = gradients or grads
        updates, state = TX.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        losses.append(float(loss))
    return gradients, losses


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, id=p.name, marks=() if p.name in FAST else pytest.mark.slow)
        for p in PROGRAMS
    ],
)
def test_streamed_gradients_are_those_of_jax(program):
    engine = zinf.initialize(
        program.loss,
        program.init,
        TX,
        streamed_config(ON_HOST, "") | program.config,
        has_aux=program.has_aux,
        rng=KEY if program.uses_key else None,
    )
    params = engine.params()
    gradients, losses = train_in_jax(program, params)
    evaluated = engine.evaluate(program.batch)
    metrics = [engine.step(program.batch)]
    found = {p: read_trace(engine, p) for p in gradients}
    metrics += [engine.step(program.batch) for _ in range(STEPS - 1)]
    tolerance = BFLOAT16 if "cast" in program.name else TOLERANCE
    for path, wanted in gradients.items():
        largest = np.max(np.abs(wanted), initial=0)
        is_zero = any(fnmatch(path, glob) for glob in program.without_gradient)
        assert (largest == 0) == is_zero, path
        np.testing.assert_allclose(
            found[path], wanted, rtol=0, atol=tolerance * largest, err_msg=path
        )
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=tolerance)
    np.testing.assert_allclose(evaluated, losses[0], rtol=tolerance)
    after = named_leaves(engine.params())
    for path in program.frozen:
        np.testing.assert_array_equal(after[path], named_leaves(params)[path])
    if program.has_aux:
        wanted = program.loss(params, program.batch)[1]
        chex.assert_trees_all_close(metrics[0]["aux"], wanted, rtol=1e-5)
    operations = [i.operation for i in engine.plan.instructions]
    runs = {x.name for x in operations if isinstance(x, Run)}
    assert len(runs) >= program.min_segments
    engine.close()


def read_trace(engine, path):
    # A copy: the next step may overwrite what is read on the host.
    return np.array(engine.residents.read(ArrayId(Role.STATE, path, slot=0)))


def test_every_fast_program_is_one():
    assert FAST <= {p.name for p in PROGRAMS}
