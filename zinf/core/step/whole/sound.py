"""Whether a device computes right gradients from arrays that rest in host memory.

XLA has had gradients that were silently wrong where a loop slices host arrays in
reverse (openxla/xla#46231, mended by #46308; open: #47362, #47380, #34565). So the
first offloaded step of a process on an accelerator is preceded by two steps of a small
model, whose new parameters are compared with those of plain jax.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.optim.clipping import Clipping
from zinf.core.optim.separate import separate
from zinf.core.problem.problem import make_problem
from zinf.core.problem.user_loss import UserLoss
from zinf.core.segment import segment_loss, trace_loss
from zinf.core.sharding import axis_rule, persistent_layouts
from zinf.core.sharding.mesh import make_mesh
from zinf.core.step.arrays import array_specs
from zinf.core.step.whole.frame import Frame
from zinf.core.step.whole.offloaded import OffloadedProgram, compile_offloaded

# A tile of a TPU's memory has 128 columns.
LAYERS, WIDTH, SAMPLES = 5, 128, 8
# Of the largest change. Matmuls of accelerators round to 8 bits or more, and the rows
# of another layer differ by about as much as the largest change itself.
BOUND = 0.05


def check_sound(device: jax.Device) -> None:
    """Raise if the device does not compute with host arrays as it should.

    Raises:
        NotImplementedError: the message says by how much gradients differ.
    """
    error = deviation(device)
    if not error <= BOUND:
        raise NotImplementedError(
            "execution is 'offloaded', and the gradients of a small offloaded model on "
            f"{device} differ from those of plain jax by {error:.1%} of the largest: "
            "this version of XLA slices arrays in host memory wrongly "
            "(openxla/xla#46231). Update jax, or use execution: streamed."
        )


@cache
def deviation(device: jax.Device) -> float:
    """The largest error of new parameters, as a share of the largest change."""
    with jax.default_device(device):
        params, batch = _params(), _batch()
        gradients = jax.jit(jax.grad(_loss))(params, batch)
        pairs = zip(params, gradients, strict=True)
        wanted = [p - np.asarray(g) for p, g in pairs]
        largest = max(float(np.max(np.abs(g))) for g in gradients)
    found = [_stepped(device, in_passes) for in_passes in (False, True)]
    errors = [
        float(np.max(np.abs(x - y)))
        for each in found
        for x, y in zip(each, wanted, strict=True)
    ]
    # A maximum that has met a NaN is NaN.
    return float(np.max(errors)) / largest


def _params() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shape = WIDTH, WIDTH
    scale = np.float32(WIDTH**-0.5)
    return [random.standard_normal(shape, np.float32) * scale for _ in range(LAYERS)]


def _batch() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((SAMPLES, WIDTH), np.float32)


def _loss(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.sum(jnp.square(x)) / SAMPLES


def _stepped(device: jax.Device, in_passes: bool) -> list[np.ndarray]:
    """The parameters after an offloaded step, whose updates subtract the gradients."""
    program = _program(device, in_passes)
    params = {f"{n}": w for n, w in enumerate(_params())}
    stacks = []
    for stack in program.changed:
        content = np.stack([params[array.path] for array in stack.members])
        stacks.append(jax.device_put(content.reshape(stack.shape), stack.sharding))
    batch = jax.device_put(_batch()[None], device)
    changed, _ = program.step(stacks, [], batch, None, [], np.float32(1), np.float32(1))
    new = {}
    for stack, content in zip(program.changed, changed, strict=True):
        rows = np.asarray(content).reshape(len(stack.members), WIDTH, WIDTH)
        new |= {a.path: row for a, row in zip(stack.members, rows, strict=True)}
    return [new[path] for path in params]


def _program(device: jax.Device, in_passes: bool) -> OffloadedProgram:
    rule = axis_rule(make_mesh([device]), stage=0, min_bytes=0)
    problem = make_problem(UserLoss(_loss, _params()))
    separated = separate(optax.sgd(1.0), problem.abstract_params)
    batch = jax.ShapeDtypeStruct((SAMPLES, WIDTH), np.float32)
    source = trace_loss(
        problem.loss,
        problem.abstract_arguments(),
        batch,
        has_aux=True,
        max_remat_bytes=1 << 62,
    )
    layouts = persistent_layouts(array_specs(problem, separated), rule)
    segmented = segment_loss(source, frozen=(), splittable=(), max_bytes=None)
    return compile_offloaded(
        Frame(problem, separated, batch, None, 1, Clipping(), layouts),
        segmented,
        offloads_values=not in_passes,
        updates_in_passes=in_passes,
    )
