"""`zinf.verify`: checks that a model trains on zinf as in plain jax and optax."""

import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zinf.core.config import Config
from zinf.core.config.load import raw_config
from zinf.core.engine.initialize import (
    ConfigSource,
    initialize,
    make_planner,
    optimizer_of,
)
from zinf.core.engine.random_key import step_keys
from zinf.core.jaxpr.keys import to_words
from zinf.core.machine.capacity import host_memory_bytes
from zinf.core.machine.devices import on_devices
from zinf.core.problem.modes import for_training
from zinf.core.problem.problem import STATE_PREFIX, Problem
from zinf.core.problem.source import named_leaves
from zinf.core.process.installed import installed_version
from zinf.core.program import ArrayId, Role
from zinf.core.sharding.mesh import local_devices
from zinf.core.step.batch import batch_spec, by_microbatch
from zinf.core.verification import (
    LeafChecks,
    Microbatches,
    PlainRun,
    PlainTraining,
    Verification,
    check_arrays,
    check_losses,
)
from zinf.core.verification.compare import NUM_PERTURBED

# Units in the last place of the formats to which accelerators round float32 operands of
# matmuls: bfloat16 and TensorFloat-32.
MATMUL_UNITS = {"tpu": 2.0**-7, "gpu": 2.0**-10, "cuda": 2.0**-10}
PRECISION = "jax_default_matmul_precision"
FULL_PRECISION = {"highest", "float32", "F32_F32_F32"}


def verify(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation | None,
    config: ConfigSource = None,
    *,
    batch: Any,
    num_steps: int = 3,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    model_state: Any = None,
    state_rules: Mapping[str, str] | None = None,
    mesh: Mesh | None = None,
) -> Verification:
    """Train for a few steps on zinf and in plain jax, and compare both leaf by leaf.

    The plain run uses `jax.jit`, `jax.value_and_grad` and optax on one device. It has
    the same initial parameters, keys, microbatches, clipping, frozen leaves and compute
    dtype. The comparison covers the loss of every step, the gradients of the first
    step, and the parameters and model state after the last step.

    No files are left: the NVMe tier uses temporary folders in the configured ones. If
    the config does not set `execution`, zinf streams.

    Args:
        loss_fn, params, tx, config, has_aux, rng, model_state, state_rules, mesh: as in
            `zinf.initialize`.
        batch: an example with values; every step uses it.
        num_steps: number of steps.

    Raises:
        ValueError: as for `zinf.initialize`, or the model is too large to train in
            plain jax on one device.
    """
    _refuse_calls(num_steps)
    if tx is None:
        tx, config = optimizer_of(config)
    config, mesh = on_devices(config, mesh)
    options: dict[str, Any] = {
        "has_aux": has_aux,
        "rng": rng,
        "model_state": model_state,
        "state_rules": state_rules,
        "mesh": mesh,
    }
    problem = make_planner(loss_fn, params, tx, config, **options).problem
    plain = _plain_training(problem, loss_fn, tx, config, has_aux=has_aux)
    device = local_devices(mesh)[0]
    steps = _steps(batch, rng, config.num_microbatches, num_steps)
    _refuse_large(plain, device)
    with jax.default_device(device):
        initial, state = _initial(problem, device)
        derivative, unit, temporary_bytes = plain.compile(state, steps[0])
        unit = max(unit, _matmul_unit(device))
        _refuse_large(plain, device, temporary_bytes)
    with _scratch(config) as scratch:
        given = loss_fn, params
        streamed = _train(*given, tx, scratch, options, batch, num_steps)
        scale = streamed.gradient_scale
        gradients = _gradients(*given, scratch, options, batch, scale)
    steps = [
        replace(step, loss_scale=scale)
        for step, scale in zip(steps, streamed.scales, strict=True)
    ]
    with jax.default_device(device):
        key = jax.random.key(0)
        noises = [(jax.random.fold_in(key, n), unit) for n in range(NUM_PERTURBED)]
        run = partial(plain.run, initial, state, steps, derivative)
        plains = [run(gradient_scale=scale, noise=x) for x in (None, *noises)]
    losses, *perturbed = [run.losses for run in plains]
    return Verification(
        streamed.execution,
        tuple(zip(streamed.losses, losses, strict=True)),
        tuple(check_losses(streamed.losses, losses, perturbed)),
        tuple(_compare(problem, streamed, gradients, plains, unit)),
        (_versions(mesh), streamed.setting),
    )


def _refuse_calls(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; at least one step is compared.")
    if jax.process_count() > 1:
        raise ValueError(
            f"zinf.verify compares in one process, and jax runs {jax.process_count()}. "
            "Start it alone; `mesh` may have all devices of this process."
        )


def _plain_training(
    problem: Problem, loss_fn: Callable, tx: Any, config: Config, *, has_aux: bool
) -> PlainTraining:
    """The same training in plain jax and optax."""
    return PlainTraining(
        for_training(loss_fn),
        tx,
        {p: s for p, s in problem.params.items() if not p.startswith(STATE_PREFIX)},
        jax.tree.structure(problem.abstract_params),
        has_aux=has_aux,
        has_state=problem.has_state,
        clip_bound=config.clip_norm,
        averages_microbatches=config.loss_average == "microbatches",
        state_rules=problem.state_rules,
    )


@dataclass(frozen=True)
class _Trained:
    """The results of a run on zinf, on the host.

    Attributes:
        leaves: parameters and model state after the last step, by path.
        scales: the loss scale of each step; 1 without scaling.
        gradient_scale: the loss scale of the first step that did not overflow.
    """

    execution: str
    losses: list[float]
    leaves: dict[str, np.ndarray]
    scales: list[float]
    gradient_scale: float
    setting: str


def _steps(
    batch: Any, rng: jax.Array | None, num_microbatches: int, num_steps: int
) -> list[Microbatches]:
    """The inputs of each step: the same batch, with the keys that zinf would use."""
    spec = batch_spec(batch, num_microbatches)
    whole = by_microbatch(batch, spec, num_microbatches)
    cut = [jax.tree.map(itemgetter((m, ...)), whole) for m in range(num_microbatches)]
    none = [None] * num_microbatches
    return [
        Microbatches(cut, step_keys(rng, number, num_microbatches) or none)
        for number in range(num_steps)
    ]


def _initial(problem: Problem, device: jax.Device) -> tuple[list[Any], Any]:
    """The initial leaves of the parameters and the initial model state."""
    read = dict(problem.initial_leaves(device)).__getitem__
    return jax.tree.leaves(problem.restore_tree(read)), problem.restore_state(read)


def _refuse_large(
    plain: PlainTraining, device: jax.Device, temporary_bytes: int = 0
) -> None:
    """Raise if the plain step does not fit on one device; it cannot use more."""
    step_bytes, result_bytes = plain.needed_bytes()
    needed = step_bytes + temporary_bytes
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        available, where = stats["bytes_limit"], f"{device.device_kind} has"
    else:
        # The device uses host memory, which also holds the results of all runs.
        needed += (2 + NUM_PERTURBED) * result_bytes
        available, where = host_memory_bytes(), "this machine has"
    if needed > available:
        raise ValueError(
            "To compare with plain jax, all of the training has to fit on one device: "
            f"it needs {needed:,} bytes, and {where} {available:,}. Verify the same "
            "loss function, optimizer and config with a smaller model (fewer layers) "
            "or a smaller batch: zinf runs the same code at any size."
        )


@contextmanager
def _scratch(config: Config) -> Generator[Config, None, None]:
    """Yields the config with temporary NVMe folders; "auto" execution is streamed."""
    raw = raw_config(config)
    if config.execution == "auto":
        raw["execution"] = "streamed"
    with ExitStack() as stack:
        if config.nvme_paths:
            folders = [stack.enter_context(_folder_in(p)) for p in config.nvme_paths]
            raw["memory"] = {**raw.get("memory", {}), "nvme": folders}
            zero = dict(raw.get("zero_optimization", {}))
            for key in ("offload_param", "offload_optimizer"):
                if zero.get(key):
                    zero[key] = {k: v for k, v in zero[key].items() if k != "nvme_path"}
            raw["zero_optimization"] = zero
        yield Config.load(raw, world_size=config.world_size)


@contextmanager
def _folder_in(path: Path) -> Generator[Path, None, None]:
    """Yields a new folder in `path`; deletes it, and parents that it had to make."""
    missing = [p for p in (path, *path.absolute().parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix="zinf-verify-", dir=path) as name:
            yield Path(name)
    finally:
        for folder in missing:
            folder.rmdir()


def _train(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation,
    config: Config,
    options: dict[str, Any],
    batch: Any,
    num_steps: int,
) -> _Trained:
    """Run the steps on zinf."""
    with closing(initialize(loss_fn, params, tx, config, **options)) as engine:
        metrics = [engine.step(batch) for _ in range(num_steps)]
        scales = [m.get("loss_scale", 1.0) for m in metrics]
        taken = [s for s, m in zip(scales, metrics, strict=True) if not m["skipped"]]
        if not taken:
            raise ValueError(
                f"All {num_steps} steps overflowed and were skipped, so there is "
                "nothing to compare. Lower fp16.initial_scale_power, or take more "
                "steps."
            )
        trees = {"": engine.params(), STATE_PREFIX: engine.model_state()}
        leaves = {
            prefix + path: np.asarray(to_words(leaf))
            for prefix, tree in trees.items()
            for path, leaf in named_leaves(tree).items()
        }
        plan, losses = engine.plan, [m["loss"] for m in metrics]
        whole = "offloaded" if plan.is_offloaded else "fused"
        execution = whole if plan.is_offloaded or plan.is_fused else "streamed"
        resting = ", ".join(f"{tier} {n:,}" for tier, n in plan.home_bytes.items())
        setting = f"{len(plan.instructions):,} instructions; bytes at rest: {resting}"
        return _Trained(execution, losses, leaves, scales, taken[0], setting)


def _gradients(
    loss_fn: Callable,
    params: Any,
    config: Config,
    options: dict[str, Any],
    batch: Any,
    scale: float,
) -> dict[str, np.ndarray]:
    """The gradients of the first step on zinf, before clipping.

    They come from a second run, whose optimizer stores the gradient as its state.
    """
    given = ["gradient_clipping=null"]
    if config.loss_scaling is not None:
        given.append(f"fp16.loss_scale={scale}")
    config = Config.load(config, given)

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), updates

    keep = optax.GradientTransformation(init, update)
    with closing(initialize(loss_fn, params, keep, config, **options)) as engine:
        engine.step(batch)
        residents = engine.residents
        return {
            path: np.array(residents.read(ArrayId(Role.STATE, path, slot=0)))
            for path, spec in engine.planner.problem.params.items()
            if spec.is_trainable
        }


def _compare(
    problem: Problem,
    streamed: _Trained,
    gradients: Mapping[str, np.ndarray],
    plains: Sequence[PlainRun],
    unit: float,
) -> Iterator[LeafChecks]:
    plain, *perturbed = plains
    for path, spec in problem.params.items():
        gradient = None
        if spec.is_trainable:
            gradient = check_arrays(
                gradients[path],
                plain.gradients[path].astype(gradients[path].dtype),
                [run.gradients[path] for run in perturbed],
                unit=unit,
            )
        param = check_arrays(
            streamed.leaves[path],
            plain.leaves[path],
            [run.leaves[path] for run in perturbed],
            unit=_unit(spec.master.dtype),
        )
        shape, dtype = spec.given.shape, str(spec.master.dtype)
        yield LeafChecks(path, shape, dtype, gradient, param)


def _unit(dtype: Any) -> float:
    """The unit in the last place of 1; for other than floating-point, float32's."""
    kind = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    return float(jnp.finfo(kind).eps)


def _matmul_unit(device: jax.Device) -> float:
    """The rounding unit of float32 matmuls on an accelerator, or 0."""
    if getattr(jax.config, PRECISION) in FULL_PRECISION:
        return 0.0
    return MATMUL_UNITS.get(device.platform, 0.0)


def _versions(mesh: Mesh) -> str:
    names = ("zinf", "jax", "jaxlib", "optax")
    packages = [f"{name} {installed_version(name)}" for name in names]
    device = local_devices(mesh)[0]
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    return ", ".join((*packages, f"Python {platform.python_version()}", devices))
