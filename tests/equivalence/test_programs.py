"""What a user's loss may contain: streamed gradients and losses are those of jax."""

from fnmatch import fnmatch

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.programs import PROGRAMS
from tests.equivalence.training import streamed_config
from tests.marks import slow_except
from zinf.plan import Run
from zinf.program import ArrayId, Role
from zinf.segment import named_leaves

# As in test_reference: the order of float32 sums. What programs cast to bfloat16
# themselves is rounded to 2^-9 some eight times on its way through three layers.
TOLERANCE, BFLOAT16 = 1e-5, 2**-6
STEPS = 2
# One of each kind: keys, shared parameters, stacks, loops, custom rules, rematerialised
# layers, and what goes in and out.
FAST = {
    "dropout_with_microbatches",
    "tied_embeddings",
    "scalar_parameters",
    "parameters_cast_at_the_top",
    "stacks_of_stacks_numbers_and_integers",
    "linen_remat",
    "custom_vjp_in_every_layer",
    "custom_jvp_in_every_layer",
    "stopped_gradients",
    "scan_of_checkpointed_layers",
    "loops_and_branches_in_every_layer",
    "an_encoder_and_a_decoder",
    "experts_chosen_by_a_router",
    "experts_of_every_layer",
    "a_haiku_transform",
    "aux_outputs_of_all_kinds",
    "batch_leaves_that_are_scalars_or_unread",
    "a_loss_without_a_gradient",
}
# The trace of momentum is the gradient itself after the first step.
TX = optax.sgd(0.1, momentum=0.9)
# Its programs compile several times as fast as those of the default.
KEY = jax.random.key(11, impl="unsafe_rbg")


def train_in_jax(program, params):
    """`(gradients of the first step, losses)` with `jax.grad` and optax."""
    count = program.config.get("gradient_accumulation_steps", 1)
    named = named_leaves(params)
    trained = {p: x for p, x in named.items() if p not in program.frozen}
    structure = jax.tree.structure(params)

    def loss_of(trained, i):
        tree = jax.tree.unflatten(
            structure, [trained.get(p, x) for p, x in named.items()]
        )
        key = jax.random.fold_in(KEY, i)
        losses = []
        for m in range(count):
            rows = BATCH_OF(program, m, count)
            own = key if count == 1 else jax.random.fold_in(key, m)
            result = program.loss(tree, rows, *([own] if program.uses_key else []))
            losses.append(result[0] if program.has_aux else result)
        return sum(losses) / count

    step = jax.jit(jax.value_and_grad(loss_of))
    state, losses, gradients = TX.init(trained), [], None
    for i in range(STEPS):
        loss, grads = step(trained, i)
        gradients = gradients or grads
        updates, state = TX.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        losses.append(float(loss))
    return gradients, losses


def BATCH_OF(program, m, count):
    def rows(x):
        return jnp.asarray(x if not np.ndim(x) else np.split(x, count)[m])

    return jax.tree.map(rows, program.batch)


@pytest.mark.sampled(3, slow=8)
@pytest.mark.parametrize(
    "program",
    slow_except([p for p in PROGRAMS if p.name in FAST], PROGRAMS),
    ids=lambda p: p.name,
)
def test_streamed_gradients_are_those_of_jax(program):
    config = {**streamed_config(("cpu", "cpu"), ""), **program.config}
    engine = zinf.initialize(
        program.loss,
        program.init,
        TX,
        config,
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
    runs = {i.operation.name for i in engine.plan.instructions if is_run(i)}
    assert len(runs) >= program.min_segments
    engine.close()


def read_trace(engine, path):
    # A copy: the next step may overwrite what is read on the host.
    return np.array(engine.residents.read(ArrayId(Role.STATE, path, slot=0)))


def is_run(instruction):
    return isinstance(instruction.operation, Run)
