"""Section of gpu_check.py: the memory that the host tier of streamed steps can have.

For each kind of `memory.pinned` (arrays, registered, off): GB/s there and back as zinf
moves arrays, seconds to open it for many bytes, and steps of one GPT whose state is on
the host. Losses must be bit-equal: a kind with other losses fails the section, which
says not to use it.
"""

import time
from dataclasses import replace
from typing import Any

from gpu_rows import Rows, Setting, imported
from gpu_train import DRY_SHAPE, TRAIN_SHAPE, Shape, optimizer, zinf_config

NUM_LAYERS, NUM_STEPS = 4, 4
# Registering pins all memory of a plan when a run starts.
OPENED_BYTES, DRY_OPENED_BYTES = 8 * 2**30, 2**20


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    choose = imported("zinf.core.memory.host.pages.choose")
    found = choose.measure([device])
    for kind, rates in found.items():
        for name, n in (("h2d", 0), ("d2h", 1)):
            path = f"zinf, pinned {kind}"
            if isinstance(rates, str):
                rows.skip(name, rates, path=path)
            else:
                rows.add(name, rates[n], "GB/s", path=path)
        if not isinstance(rates, str):
            nbytes = DRY_OPENED_BYTES if setting.is_dry else OPENED_BYTES
            start = time.perf_counter()
            choose.KINDS[kind]([device], nbytes).close()
            seconds = time.perf_counter() - start
            rows.add("open", seconds, "s", pinned=kind, GiB=nbytes / 2**30)
    kind, why = choose.fastest([found])
    rows.add("memory.pinned: auto is", kind, note=why)
    losses: dict[str, tuple[float, ...]] = {}
    for kind, rates in found.items():
        if not isinstance(rates, str):
            losses[kind] = train(setting, rows, kind)
    wrong = [kind for kind, found in losses.items() if found != losses["off"]]
    if wrong:
        raise AssertionError(
            f"Do not use memory.pinned: {' or '.join(wrong)} on this machine: losses "
            f"are not those of off: {losses}"
        )


def train(setting: Setting, rows: Rows, kind: str) -> tuple[float, ...]:
    """The losses of some steps; reports their times, and each link's rate."""
    np = imported("numpy")
    # Not the lazy package "zinf", whose import succeeds even if a module is missing.
    initialize = imported("zinf.core.engine.initialize").initialize
    models = imported("zinf.models")
    shape: Shape = DRY_SHAPE if setting.is_dry else TRAIN_SHAPE
    model = models.GPTConfig(
        num_layers=1 if setting.is_dry else NUM_LAYERS,
        num_heads=shape.num_heads,
        embed_dim=shape.embed_dim,
        vocab_size=shape.vocab_size,
        max_length=shape.length,
    )
    tokens = np.random.default_rng(0).integers(
        0, shape.vocab_size, (shape.num_sequences, shape.length + 1), np.int32
    )
    batch = {"tokens": tokens}
    init, loss = models.init_and_loss(model, seed=0)
    config: dict[str, Any] = zinf_config(replace(setting, case="host"), None)
    config["memory"]["pinned"] = kind
    engine = initialize(loss, init, optimizer(), config, batch=batch)
    losses, times = [], []
    for step in range(2 if setting.is_dry else NUM_STEPS):
        metrics = engine.step(batch)
        losses.append(float(metrics["loss"]))
        # The first step fills pools and caches.
        if step:
            times.append(metrics["step_seconds"])
    rows.add_all("step", times, "s", pinned=kind)
    plan, timeline = engine.last_step.plan, engine.last_step.timeline
    for link, seconds in timeline.busy_seconds(plan.instructions).items():
        if str(link) in ("h2d", "d2h") and seconds:
            rate = plan.link_bytes(link) / seconds / 1e9
            rows.add("in a step", rate, "GB/s", link=str(link), pinned=kind)
    engine.close()
    return tuple(losses)
