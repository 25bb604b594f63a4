"""Sections of gpu_check.py that train a GPT, with zinf and with plain JAX.

Both keep a float32 master, two float32 moments and a bfloat16 copy of each parameter
(14 bytes), and recompute each layer in the backward pass.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpu_rows import GIB, Rows, Setting, Skipped, free_bytes, imported

# Dense bfloat16 TFLOP/s of one chip from its data sheet, by a part of its name.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312}
# Flops with remat over flops without: 4 forward passes' worth instead of 3.
REMAT = 4 / 3
# Share of the usable memory for the host tier; the process itself needs the rest.
HOST_PART = 0.7
# Share of the drive's free bytes that the nvme tier may use.
DRIVE_PART = 0.6
# Bytes that the update of an element writes: master, two moments, bfloat16 copy.
RESULT_BYTES = 14
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    embed_dim: int
    num_heads: int
    vocab_size: int
    length: int
    num_sequences: int


# TRAIN_SHAPE has 1.07G parameters with 20 layers; LARGEST_SHAPE has 0.31G per layer.
TRAIN_SHAPE = Shape(2048, 16, 32768, 1024, 16)
LARGEST_SHAPE = Shape(5120, 40, 32768, 1024, 4)
DRY_SHAPE = Shape(32, 2, 256, 16, 2)
NVME = {"device": "nvme"}
HOST = {"device": "cpu"}


def run(setting: Setting, rows: Rows) -> None:
    """Trains one contender; `case` is "plain", or how zinf places the state."""
    setting.device()
    peak = imported("anonymous_memory").MemoryPeak()
    shape = LARGEST_SHAPE if setting.section == "largest" else TRAIN_SHAPE
    shape = DRY_SHAPE if setting.is_dry else shape
    models = imported("zinf.models")
    model = models.GPTConfig(
        num_layers=setting.num_layers,
        num_heads=shape.num_heads,
        embed_dim=shape.embed_dim,
        vocab_size=shape.vocab_size,
        max_length=shape.length,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(
        0, shape.vocab_size, (shape.num_sequences, shape.length + 1), np.int32
    )
    job = Job(setting, rows, model, {"tokens": tokens})
    rows.add("parameters", job.num_parameters / 1e9, "G", layers=setting.num_layers)
    rows.add("tokens a step", shape.num_sequences * shape.length)
    (train_plain if setting.case == "plain" else train_zinf)(job)
    rows.add("peak anonymous memory", peak.nbytes() / GIB, "GiB")
    peak.stop()
    stats = jax.devices()[0].memory_stats()
    if stats:
        rows.add("peak device memory", stats["peak_bytes_in_use"] / GIB, "GiB")


@dataclass(frozen=True)
class Job:
    setting: Setting
    rows: Rows
    model: Any
    batch: Mapping[str, np.ndarray]

    @property
    def num_parameters(self) -> int:
        return imported("zinf.models").num_parameters(self.model)

    @property
    def num_tokens(self) -> int:
        rows, columns = self.batch["tokens"].shape
        return rows * (columns - 1)

    @property
    def flops(self) -> float:
        """Flops of a step: forward and backward, without recompute."""
        return self.num_tokens * imported("zinf.models").flops_per_token(self.model)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


# Plain JAX.


def train_plain(job: Job) -> None:
    model = replace(job.model, scan_layers=True, remat=True)
    init, loss = imported("zinf.models").init_and_loss(model, seed=0)
    tx = optimizer()

    def start() -> Any:
        masters = init()
        return masters, tx.init(masters)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        masters, moments = state
        short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
        value, gradients = jax.value_and_grad(loss)(short, batch)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
        changes, moments = tx.update(wide, moments, masters)
        return (optax.apply_updates(masters, changes), moments), value

    compiled = jax.jit(step, donate_argnums=0)
    batch = jax.device_put(dict(job.batch))
    try:
        began = time.perf_counter()
        state = [jax.block_until_ready(jax.jit(start)())]
        job.rows.add("initialize", time.perf_counter() - began, "s")

        def once() -> float:
            state[0], value = compiled(state[0], batch)
            return float(jax.block_until_ready((state[0], value))[1])

        report_steps(job, once)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        job.rows.add("out of memory", True, note=" ".join(str(error).split())[:300])
    else:
        job.rows.add("out of memory", False)


def is_out_of_memory(error: Exception) -> bool:
    return any(word in str(error) for word in OUT_OF_MEMORY)


# zinf.


def train_zinf(job: Job) -> None:
    # Not the lazy package "zinf", whose import succeeds even if a module is missing.
    initialize = imported("zinf.core.engine.initialize").initialize
    models = imported("zinf.models")
    init, loss = models.init_and_loss(job.model, seed=0)
    setting = job.setting
    folder = Path(mkdtemp(prefix="zinf-gpu-", dir=setting.folder))
    try:
        began = time.perf_counter()
        config = zinf_config(setting, folder)
        try:
            engine = initialize(loss, init, optimizer(), config, batch=job.batch)
        except imported("zinf.core.plan").InfeasibleError as error:
            raise Skipped(f"no plan fits: {error}") from error
        job.rows.add("initialize", time.perf_counter() - began, "s")
        report_plan(job, engine.plan)
        step = report_steps(job, lambda: engine.step(job.batch)["loss"])
        report_links(job, engine, step)
        engine.close()
    finally:
        shutil.rmtree(folder)


def zinf_config(setting: Setting, folder: Path | None) -> dict[str, Any]:
    """Puts all state on the tier of `case`; "fill" uses the fastest tiers with room."""
    memory: dict[str, Any] = {"host": int(setting.ram_bytes * HOST_PART)}
    if setting.is_dry:
        memory |= {"device": "256MiB", "host": "256MiB"}
    zero: dict[str, Any] = {"stage": 3}
    if setting.case == "host":
        zero |= {"offload_param": HOST, "offload_optimizer": HOST}
    else:
        memory |= {"nvme": [str(folder)]}
        memory |= {"nvme_capacity": int(free_bytes(setting.folder) * DRIVE_PART)}
    if setting.case == "nvme":
        zero |= {"offload_param": NVME, "offload_optimizer": NVME}
    return {
        "execution": "streamed",
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "memory": memory,
    }


def report_plan(job: Job, plan: Any) -> None:
    for tier, nbytes in plan.home_bytes.items():
        peak = plan.peak_bytes[tier] / GIB
        budget = plan.capacity_bytes[tier] / GIB
        note = f"peak {peak:.1f} of {budget:.1f} GiB"
        job.rows.add("at rest", nbytes / GIB, "GiB", note, tier=str(tier))
    job.rows.add("instructions", len(plan.instructions))


def report_links(job: Job, engine: Any, step: float) -> None:
    """Reports busy time and lower bound of each link, and both predictions."""
    plans = imported("zinf.core.plan")
    plan, timeline = engine.last_step.plan, engine.last_step.timeline
    rows = job.rows
    for link, seconds in timeline.busy_seconds(plan.instructions).items():
        nbytes = plan.link_bytes(link)
        note = f"{nbytes / 1e9:.2f} GB"
        if nbytes and seconds:
            note += f" at {nbytes / seconds / 1e9:.2f} GB/s"
        rows.add("busy", seconds, "s", note, link=str(link))
    rows.add("predicted before", plan.timeline.seconds, "s", "rates as assumed")
    rates = plans.measured_rates(plan.instructions, timeline, plan.rates)
    predicted = plans.predict(plan.instructions, rates).seconds
    rows.add("predicted after", predicted, "s", "rates of the last step")
    least = least_seconds(job, plan, plans.Link)
    for link, seconds in least.items():
        rows.add("needs at least", seconds, "s", "at the measured rate", link=link)
    if least:
        binding = max(least, key=least.__getitem__)
        rows.add("bound", least[binding], "s", f"{binding} binds")
        rows.add("step / bound", step / least[binding], "x")


def least_seconds(job: Job, plan: Any, link: Any) -> dict[str, float]:
    """Lower bound of each link's seconds in a step, at its highest measured rate."""
    given = job.setting.given
    drive = plan.link_bytes(link.NVME_READ) + plan.link_bytes(link.NVME_WRITE)
    work = {
        "h2d": plan.link_bytes(link.H2D) / 1e9,
        "d2h": plan.link_bytes(link.D2H) / 1e9,
        "drive": drive / 1e9,
        "host": plan.link_bytes(link.HOST) / RESULT_BYTES / 1e9,
        "device": job.flops * REMAT / 1e12,
    }
    return {x: work[x] / given[x] for x in work if given.get(x)}


# Both contenders.


def report_steps(job: Job, step: Callable[[], float]) -> float:
    """Times up to 5 steps after the first, while time is left; returns the median."""
    began = time.perf_counter()
    loss = step()
    first = time.perf_counter() - began
    job.rows.add("first step", first, "s", f"loss {loss:.3f}")
    times: list[float] = []
    while not times or (len(times) < 5 and job.rows.seconds_left > 3 * times[-1]):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
    job.rows.add_all("step", times, "s", f"last loss {loss:.3f}")
    job.rows.add_rate("tokens", job.num_tokens, times, "/s")
    peak, source = _peak_flops(job.setting)
    if peak:
        job.rows.add_rate("MFU", job.flops / peak, times, f"of {source}")
    return sorted(times)[len(times) // 2]


def _peak_flops(setting: Setting) -> tuple[float, str]:
    kind = jax.devices()[0].device_kind
    for name, tflops in PEAK_TFLOPS.items():
        if name in kind:
            return tflops * 1e12, f"{tflops} TFLOP/s ({name})"
    measured = setting.given.get("device", 0.0)
    return measured * 1e12, f"{measured:.3g} TFLOP/s (matmul, measured)"
