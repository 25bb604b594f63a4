"""What is cut over devices goes out whole, and comes in cut."""

from pathlib import Path
from typing import Any

import jax
import optax
import pytest
import safetensors

import zinf
from tests.marks import slow_except
from tests.robustness.small import content
from tests.unit.interchange.models import (
    BATCH,
    BF16,
    ON_DEVICE,
    draw,
    flat,
    init,
    loss_fn,
    on_nvme,
)
from zinf.interchange import export_safetensors, import_safetensors

NUM_DEVICES = BATCH


def start(config, params) -> zinf.Engine:
    mesh = zinf.make_mesh(jax.devices()[:NUM_DEVICES])
    tx = optax.adamw(1e-2)
    return zinf.initialize(loss_fn, params, tx, config, batch=draw(), mesh=mesh)


def streamed(folder: Path) -> dict[str, Any]:
    return {**on_nvme(folder), **BF16}


def fused(folder: Path) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": 3}, "persistence_threshold": 1}
    return {**ON_DEVICE, **zero, **BF16}


@pytest.mark.parametrize("config", slow_except([streamed], [streamed, fused]))
def test_a_model_on_several_devices_goes_out_and_comes_in(config, tmp_path):
    engine = start(config(tmp_path / "a"), init)
    params, layouts = engine.params(), engine.residents.layouts
    cut = {a: layouts.of(a) for a, s in engine.residents.specs.items() if s.shape}
    assert all(layout.share.num_devices == NUM_DEVICES for layout in cut.values())
    # By columns, and where there are none by rows.
    assert {layout.has_whole_rows for layout in cut.values()} == {True, False}
    export_safetensors(engine, tmp_path / "out")
    found = {}
    for name, entry in safetensors.deserialize(
        (tmp_path / "out" / "model.safetensors").read_bytes()
    ):
        found[name] = bytes(entry["data"])
    assert found == {name: x.tobytes() for name, x in flat(params).items()}
    other = start(config(tmp_path / "b"), lambda: init(1))
    import_safetensors(other, tmp_path / "out")
    assert content(other) == content(engine)
    for made in (engine, other):
        made.close()
