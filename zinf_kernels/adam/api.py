"""`adam_update`: signature, checks and choice of implementation."""

import numpy as np

from zinf_kernels.adam import reference
from zinf_kernels.adam.arguments import Arrays, Scalars, adam_scalars
from zinf_kernels.dispatch import Implementation, choose


def _on_cpu(arrays: Arrays, scalars: Scalars, *, num_threads: int | None) -> None:
    # Numba takes as long to import as jax, and many runs update on the device.
    from zinf_kernels.adam.cpu import adam_update

    adam_update(arrays, scalars, num_threads=num_threads)


EXISTING = {"cpu": _on_cpu, "reference": reference.adam_update}


def adam_update(
    master: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    gradient: np.ndarray,
    *,
    step: int,
    learning_rate: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    factor: float = 1.0,
    copy: np.ndarray | None = None,
    num_threads: int | None = None,
    implementation: Implementation = None,
) -> None:
    """One step of Adam or AdamW (Loshchilov and Hutter 2019), in place.

    The formulas are those of `optax.adamw`; without weight decay, of `optax.adam`:

        g = factor * gradient
        m = (1 - b1) * g + b1 * m
        v = (1 - b2) * g**2 + b2 * v
        change = m / (1 - b1**step) / (sqrt(v / (1 - b2**step) + eps_root) + eps)
        master = master - learning_rate * (change + weight_decay * master)
        copy = master, rounded to the nearest, ties to even

    Rounding: let e = 2**-24, half a unit in the last place of 1. From equal arrays and
    with the same float32 scalars, one step of any implementation stays within

        m       3 e M, where M = |(1 - b1) g| + |b1 m|: roundings of g, of a product and
                of the sum (and 2**-8 |m| for the one to bfloat16)
        v       6 e v: g twice, two products and the sum; its terms cannot cancel
        master  e |master| + learning_rate * (12 e (|change| + |weight_decay master|)
                + 3 e M |change / m|): the last sum, all before it, and m's own

    of exact arithmetic, up to multiples of 2**-126. Two implementations stay within
    twice that of each other. The bound of m is not in units of m's own last place,
    because the two terms of m may cancel. "cpu" mostly gives the very bits of
    `optax.adamw` under jit on XLA:CPU.

    Results of m and v below 2**-126 become zero, as XLA:CPU has them. Infinities and
    NaNs go where the formulas send them.

    Args:
        master: float32 parameters, [numel]. This and all other arrays are contiguous
            NumPy arrays in host memory that share none of it.
        m: average of gradients, float32 or bfloat16.
        v: average of squared gradients, float32.
        gradient: float32, bfloat16 or float16; only read.
        step: number of this step, from 1.
        factor: what the gradient is multiplied by, in float32: that of clipping over
            the loss scale.
        copy: where to put the new parameters in bfloat16 or float16, if anywhere.
        num_threads: most threads to use, by default one for each core that the process
            may use. Changes no bit of the results.
        implementation: "cpu", "reference", or names in order of preference.

    Raises:
        ValueError: an array has the wrong dtype, length or layout, is read-only or
            shares memory with another; or a number is out of range.
    """
    scalars = adam_scalars(
        step=step,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        factor=factor,
        m_dtype=m.dtype,
    )
    adam_update_scalars(
        master,
        m,
        v,
        gradient,
        scalars=scalars,
        copy=copy,
        num_threads=num_threads,
        implementation=implementation,
    )


def adam_update_scalars(
    master: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    gradient: np.ndarray,
    *,
    scalars: Scalars,
    copy: np.ndarray | None = None,
    num_threads: int | None = None,
    implementation: Implementation = None,
) -> None:
    """`adam_update` with all scalars as they are.

    For callers whose scalars are float32 already, such as a traced optimizer's.
    """
    update = choose(implementation, op="adam_update", existing=EXISTING)
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}. Pass at least 1, or None.")
    arrays = Arrays(master, m, v, gradient, copy)
    arrays.check()
    update(arrays, scalars, num_threads=num_threads)
