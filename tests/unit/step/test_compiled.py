"""What compiled steps send and hold, against the formulas of the ZeRO paper.

Section 7: per device and step, gradients are reduce-scattered and parameters gathered
once, in stage 0 both as one all-reduce of gradients; stage 3 gathers parameters for the
forward and again for the backward pass. A ring of n devices sends (n - 1) / n of that.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import zinf
from zinf.core.engine.initialize import make_planner
from zinf.core.step.compiled import compiled_runs, largest_deviation, step_traffic
from zinf.core.topology import parse_topology
from zinf.models import GPTConfig, init_and_loss
from zinf.models.gpt_functions import flops_per_token

ROOT = Path(__file__).parents[3]
NUM_DEVICES = 8
RING = (NUM_DEVICES - 1) / NUM_DEVICES
# Wide enough that norms, biases and small tables are small terms: 2 * 8192 entries of
# 2 * 12 * 512^2 in the blocks.
MODEL = GPTConfig(
    num_layers=2, num_heads=4, embed_dim=512, vocab_size=64, max_length=64
)
SMALL_TERMS = 0.05
# So many tokens a device that a layer's matmuls take longer than its gathers.
WIDE = GPTConfig(
    num_layers=4, num_heads=16, embed_dim=2048, vocab_size=256, max_length=2048
)


def planned(stage, execution, topology=None, *, model=MODEL, **settings):
    """A planner and the step that it made for eight devices."""
    init, loss = init_and_loss(model, seed=0)
    config = {
        "zero_optimization": {"stage": stage},
        "execution": execution,
        "segment": {"remat": "always"},
        "memory": {"device": "4GiB", "host": "4GiB"},
        **settings,
    }
    machine = None if topology is None else parse_topology(topology)
    devices = jax.devices()[:NUM_DEVICES] if machine is None else machine.devices()
    where = {"mesh": zinf.make_mesh(devices), "topology": machine}
    planner = make_planner(loss, init, optax.adamw(1e-4), config, **where)
    rows = NUM_DEVICES * config.get("gradient_accumulation_steps", 1)
    shape = (rows, model.max_length + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}
    return planner, planner.plan_batch(batch)


def sent(planner, made):
    """Bytes that a device sends in a step by kind, over those of all parameters."""
    traffic = step_traffic(compiled_runs(made))
    return {k: t.sent_bytes / planner.param_bytes for k, t in traffic.items()}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("stage", "execution"),
    [(0, "fused"), (2, "fused"), (3, "fused"), (3, "streamed")],
)
def test_a_gpu_sends_what_the_paper_derives(stage, execution):
    found = sent(*planned(stage, execution, f"h200:{NUM_DEVICES}"))
    wanted = RING * (3 if stage == 3 else 2)
    assert sum(found.values()) == pytest.approx(wanted, rel=SMALL_TERMS)
    if stage >= 2:
        assert found["reduce-scatter"] == pytest.approx(RING, rel=SMALL_TERMS)


@pytest.mark.gpu_compiler
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "execution", "num_layers"),
    # Nothing hides what a segment needs first: embeddings, and of a layer the queries'
    # weights, one of twelve equal parts.
    [("h200:8", "fused", 4), ("v5p:2x2x2", "streamed", 12)],
)
def test_nine_tenths_are_gathered_during_matmuls(topology, execution, num_layers):
    settings = {"bf16": {"enabled": True}, "memory": {"host": "64GiB"}}
    model = replace(WIDE, num_layers=num_layers)
    _, made = planned(3, execution, topology, model=model, **settings)
    assert step_traffic(compiled_runs(made))["all-gather"].overlapped_share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "gathers"), [(0, 0), (3, 2)])
def test_a_cpu_sends_an_all_reduce_in_place_of_a_reduce_scatter(stage, gathers):
    found = sent(*planned(stage, "fused"))
    reduced, gathered = found["all-reduce"], found.get("all-gather", 0.0)
    assert reduced == pytest.approx(2 * RING, rel=SMALL_TERMS)
    assert gathered == pytest.approx(gathers * RING, rel=SMALL_TERMS)


def flops(*arguments, microbatches=1):
    _, made = planned(*arguments, gradient_accumulation_steps=microbatches)
    return sum(run.times * run.flops for run in compiled_runs(made))


@pytest.mark.parametrize(
    "topology",
    [None, pytest.param(f"h200:{NUM_DEVICES}", marks=pytest.mark.gpu_compiler)],
)
def test_a_fused_step_has_the_flops_of_all_microbatches(topology):
    """XLA counts the body of a loop once, and nothing for an absent GPU."""
    one, two = (flops(3, "fused", topology, microbatches=n) for n in (1, 2))
    wanted = flops_per_token(MODEL) * MODEL.max_length
    assert one == pytest.approx(wanted, rel=SMALL_TERMS)
    assert two == pytest.approx(2 * one, rel=SMALL_TERMS)


def test_the_compiler_counts_the_bytes_that_the_plan_does():
    _, made = planned(3, "streamed")
    runs = compiled_runs(made)
    assert len(runs) > 4
    # Scalars, which the plan leaves out.
    assert largest_deviation(runs) < 0.01
    # A step that exchanges takes longer than its flops alone.
    assert all(i.exchange.nbytes for i in made.plan.instructions if i.flops)
    timeline = made.plan.timeline
    rate = made.plan.rates.exchange_bytes_per_second
    times = zip(made.plan.instructions, timeline.start, timeline.end, strict=True)
    for instruction, start, end in times:
        assert end - start >= instruction.exchange.exposed_bytes / rate


@pytest.mark.slow
def test_model_state_of_the_stages_is_the_papers():
    """ZeRO, figure 1: 31.4 and 1.88 GB; the other stages by the script."""
    script = ROOT / "scripts/reports/zero_table.py"
    command = [sys.executable, str(script), "--stages", "1", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    gigabytes = [float(line.split()[1]) for line in ran.stdout.splitlines()[2:]]
    assert gigabytes == pytest.approx([31.4, 1.88], rel=0.02)
