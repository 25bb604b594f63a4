"""What an offloaded step holds and moves, as the TPU compiler schedules it."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.marks import drawn
from zinf.cli.gpt_task import gpt_config
from zinf.cli.plan import on_machine
from zinf.cli.task import task_of
from zinf.core.engine.initialize import make_planner
from zinf.core.program import Tier
from zinf.core.topology import host_copies, memory, parse_topology
from zinf.models import GPTConfig, init_and_loss, num_parameters

CONFIG = Path(__file__).parents[3] / "configs" / "gpt_13b_1xh200.yaml"
MODEL = {"num_heads": 2, "embed_dim": 256, "vocab_size": 512, "max_length": 256}
LAYER_NUMEL = 12 * MODEL["embed_dim"] ** 2
# A copy of less takes longer to begin than to move, whatever it lies behind.
SMALL_BYTES = 64 * 1024


@cache
def compiled(num_layers, topology="v5e:1x1", clip=1.0, **model):
    """The step that is planned, and the memory and the code of its program."""
    config = GPTConfig(num_layers=num_layers, **MODEL, **model)
    machine = parse_topology(topology)
    options = {
        "execution": "offloaded",
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3},
        "memory": {"device": "8GiB", "host": "64GiB"},
    }
    init, loss = init_and_loss(config, seed=0)
    where = {"mesh": zinf.make_mesh(machine.devices()), "topology": machine}
    planner = make_planner(loss, init, optax.adamw(1e-4), options, **where)
    shape = (8, config.max_length + 1)
    made = planner.plan_batch({"tokens": jax.ShapeDtypeStruct(shape, np.int32)})
    state_bytes = sum(s.nbytes for s in made.program.stacks)
    step = made.program.step
    return made, state_bytes, memory(step), step.as_text()


def large_copies(text):
    return [c for c in host_copies(text) if c.nbytes >= SMALL_BYTES]


def copies_of_layers(text):
    """The copies in loops, all of which begin before they are waited for."""
    copies = [copy for copy in large_copies(text) if copy.times > 1]
    assert all(copy.is_async for copy in copies)
    return copies


def hidden_bytes(copies):
    """Of copies behind matmuls."""
    return sum(c.nbytes * c.times for c in copies if c.overlapped_matmuls)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("scan_layers", drawn([False, True], 1))
def test_state_rests_on_the_host_and_passes_hide_their_copies(scan_layers):
    made, state_bytes, found, text = compiled(6, scan_layers=scan_layers)
    # All state is in pinned host memory, and its results are in the same memory.
    assert made.plan.home_bytes[Tier.HOST] == state_bytes
    assert found.host_argument_bytes >= state_bytes
    assert found.host_alias_bytes == found.host_argument_bytes
    # Layouts of the TPU pad rows of vectors; all else is as planned.
    assert found.host_argument_bytes <= 1.05 * state_bytes
    assert found.device_bytes <= 1.05 * made.plan.peak_bytes[Tier.DEVICE]
    assert found.device_bytes < state_bytes + found.temp_bytes
    assert {copy.is_to_host for copy in host_copies(text)} == {True, False}
    assert all(copy.is_async for copy in large_copies(text))
    # Three loops over layers: forward, backward, and updates. The passes move each
    # layer's parameters in twice and its gradients out, behind its matmuls.
    gradients = 2 * 4 * LAYER_NUMEL  # of four layers, as bfloat16
    assert hidden_bytes(copies_of_layers(text)) >= 0.9 * 3 * gradients


@pytest.mark.tpu_compiler
def test_without_clipping_the_state_of_layers_moves_behind_the_backward_pass():
    made, state_bytes, found, text = compiled(6, clip=0.0)
    assert made.program.updates_in_passes
    # Beside the state there are the gradients of all that is in no loop: the first
    # layer and the embeddings. No stack is copied on the host.
    late = 2 * (LAYER_NUMEL + 768 * MODEL["embed_dim"])
    assert found.host_bytes <= 1.05 * (state_bytes + late)
    assert found.host_alias_bytes == found.host_argument_bytes
    assert all(copy.is_async for copy in large_copies(text))
    # Of four layers: parameters in twice, masters and moments in.
    fetched = [c for c in copies_of_layers(text) if not c.is_to_host]
    assert hidden_bytes(fetched) >= 0.9 * 4 * LAYER_NUMEL * (2 * 2 + 3 * 4)


@pytest.mark.gpu_compiler
def test_a_program_for_an_absent_gpu_has_its_state_in_pinned_host_memory():
    made, state_bytes, found, text = compiled(6, "h200:1")
    # The new state is in the memory of the old one. Only the batch is on the device.
    assert found.host_argument_bytes == found.host_alias_bytes == state_bytes
    assert found.host_output_bytes == state_bytes
    assert found.argument_bytes < 2**20
    gradients = made.plan.peak_bytes[Tier.HOST] - state_bytes
    assert gradients == found.host_temp_bytes >= 6 * LAYER_NUMEL * 2
    assert "S(5)" in text.split("entry_computation_layout={(")[1].split("->")[0]
    # What one layer needs crosses inside the loops.
    assert {copy.is_to_host for copy in copies_of_layers(text)} == {True, False}


@pytest.mark.gpu_compiler
def test_passes_and_updates_of_the_13b_config_have_pinned_operands_on_an_absent_h200():
    """What `zinf plan configs/gpt_13b_1xh200.yaml` compiles with these overrides."""
    # Its own host has 104 GiB, and the rest on the drive, which is streamed.
    overrides = ["execution=offloaded", "memory.host=256GiB", "memory.nvme=null"]
    # One microbatch compiles in half of the time of sixteen.
    overrides += ["memory.nvme_capacity=null", "train_batch_size=4"]
    config, mesh, machine = on_machine(CONFIG, overrides, "h200:1")
    arguments, named = task_of(config).arguments()
    planner = make_planner(*arguments, rng=named["rng"], mesh=mesh, topology=machine)
    made = planner.plan_batch(named["batch"])
    found = memory(made.program.step)
    # Parameters in bf16, and 12 bytes a parameter of masters and moments, updated where
    # they are.
    count = num_parameters(gpt_config(config))
    assert count == pytest.approx(12.9e9, rel=0.01)
    assert found.host_argument_bytes == pytest.approx(14 * count, rel=1e-3)
    assert found.host_alias_bytes == found.host_argument_bytes
    assert found.device_bytes <= made.plan.capacity_bytes[Tier.DEVICE]
    # Parameters twice, gradients, and state both ways, for each of 40 layers.
    layers = copies_of_layers(made.program.step.as_text())
    moved = sum(c.nbytes * c.times for c in layers)
    assert moved == pytest.approx((2 * 2 + 2 * 2 + 12 + 14) * count, rel=0.05)
