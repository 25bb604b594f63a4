"""Contenders of bench_adam.py that run any optax transform: zinf's update, and XLA.

As in bench_adam.py, modules are imported by name, after the number of cores is set.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

LEARNING_RATE = 3e-4
TRANSFORMS = {
    "adamw": lambda optax: optax.adamw(
        LEARNING_RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
    ),
    "lion": lambda optax: optax.lion(LEARNING_RATE, weight_decay=0.1),
    "momentum": lambda optax: optax.sgd(LEARNING_RATE, momentum=0.9),
    "rmsprop": lambda optax: optax.rmsprop(LEARNING_RATE, momentum=0.9),
    "adagrad": lambda optax: optax.adagrad(LEARNING_RATE),
    "adabelief": lambda optax: optax.adabelief(LEARNING_RATE),
    "nadamw": lambda optax: optax.nadamw(LEARNING_RATE, weight_decay=0.1),
    "amsgrad": lambda optax: optax.amsgrad(LEARNING_RATE),
    "yogi": lambda optax: optax.yogi(LEARNING_RATE),
    "adan": lambda optax: optax.adan(LEARNING_RATE),
}
# A contender fills its arrays with the two given numbers. It returns a function that
# takes a step, and one that returns the first parameter.
Stepper = tuple[Callable[[], Any], Callable[[], float]]


def host_stepper(group: Any, master: float, gradient: float) -> Stepper:
    """zinf's update of arrays in host memory, called as by the executor."""
    np, jax, optax = (import_module(x) for x in ("numpy", "jax", "optax"))
    optim = import_module("zinf.core.optim")
    dtype = import_module("ml_dtypes").bfloat16 if group.is_short else np.float32
    params = [jax.ShapeDtypeStruct((n,), np.float32) for n in group.lengths]
    separated = optim.separate(TRANSFORMS[group.transform](optax), params)
    copy_dtype = dtype if group.is_short else None
    units = [
        optim.Unit(i, (n,), dtype, copy_dtype) for i, n in enumerate(group.lengths)
    ]
    device = jax.devices("cpu")[0]
    updates = optim.host_updates(separated, units, device=device)
    advance = optim.compile_advance(separated, device=device)
    arrays = []
    for i, n in enumerate(group.lengths):
        first = np.full(n, master, np.float32)
        states = [np.array(x) for x in separated.init_state(i, first)]
        copies = [np.zeros(n, dtype)] if group.is_short else []
        arrays.append((np.full(n, gradient, dtype), first, *states, *copies))
    shared = [x.value for x in separated.shared]

    def step() -> None:
        nonlocal shared
        shared, values = advance(shared)
        for update, mine in zip(updates, arrays, strict=True):
            update(np.float32(1), values, *mine)

    return step, lambda: float(arrays[0][1][0])


def donated_stepper(group: Any, master: float, gradient: float) -> Stepper:
    """optax under jit, one call for all arrays; the results reuse their memory."""
    return _donated(group, master, gradient, parts=[group.lengths])


def donated_each_stepper(group: Any, master: float, gradient: float) -> Stepper:
    """optax under jit, one call per array; equal arrays share an executable."""
    return _donated(group, master, gradient, parts=[[n] for n in group.lengths])


def _donated(group: Any, master: float, gradient: float, *, parts: Any) -> Stepper:
    jax, jnp, optax = (import_module(x) for x in ("jax", "jax.numpy", "optax"))
    short = jnp.bfloat16
    dtype = short if group.is_short else jnp.float32
    tx = TRANSFORMS[group.transform](optax)

    def made(lengths: list[int]) -> Any:
        masters = [jnp.full(n, master, jnp.float32) for n in lengths]
        copies = [jnp.zeros(n, short) for n in lengths] if group.is_short else None
        # Copied, because optax may use one array twice, which cannot be donated twice.
        return jax.tree.map(jnp.array, (masters, tx.init(masters), copies))

    states = [made(lengths) for lengths in parts]
    gradients = [[jnp.full(n, gradient, dtype) for n in lengths] for lengths in parts]

    def update(given: Any, gradients: Any) -> Any:
        masters, state, _ = given
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        changes, state = tx.update(wide, state, masters)
        masters = optax.apply_updates(masters, changes)
        copies = [x.astype(short) for x in masters] if group.is_short else None
        return masters, state, copies

    # The old copies are unused arguments, donated so that the new copies reuse their
    # memory.
    compiled = jax.jit(update, donate_argnums=0, keep_unused=True)

    def step() -> None:
        for i, mine in enumerate(gradients):
            states[i] = compiled(states[i], mine)
        jax.block_until_ready(states)

    return step, lambda: float(states[0][0][0][0])
