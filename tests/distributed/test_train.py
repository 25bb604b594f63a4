"""`zinf train` in several real processes: as one, and with one end for all."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.processes import Ended, free_port, run_all
from zinf.cli import INTERRUPTED, USER_ERROR
from zinf.distributed.group import ENDED_BY_ANOTHER

CONFIG = """
train_batch_size: 8
gradient_accumulation_steps: 2
optimizer: {type: AdamW, params: {lr: 0.001}}
gradient_clipping: 1.0
zero_optimization: {stage: 2}
persistence_threshold: 1
model: {num_layers: 1, num_heads: 1, embed_dim: 16, max_length: 16}
data: {sequence_length: 16, paths: [TEXT]}
"""
# With that threshold all state is cut, so a save needs all processes for every array.
# Reading the standard library costs more than all that these tests train.
NUM_BYTES = 20_000
STEPS = 12
# Sums over devices are taken in another order than on one: a few of float32's last bits
# of a loss of about 5, through a dozen steps of Adam.
RELATIVE = 1e-5


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    letters = np.random.default_rng(0).integers(97, 105, NUM_BYTES).astype(np.uint8)
    text = tmp_path / "text.txt"
    text.write_bytes(letters.tobytes())
    path.write_text(CONFIG.replace("TEXT", str(text)))
    return path


def train(
    config: Path, *more: str, deeds: tuple[str, ...], at_step: int = 0
) -> list[Ended]:
    """`zinf train` in as many processes as there are deeds."""
    run = ("train", str(config), *more, "--set", f"run.output={config.parent / 'run'}")
    at = f"127.0.0.1:{free_port()}"
    lines = [
        [deed, str(at_step), *run, *place(at, len(deeds), index)]
        for index, deed in enumerate(deeds)
    ]
    return run_all("command", lines)


def sets(*keys: str) -> list[str]:
    return [part for key in keys for part in ("--set", key)]


def place(coordinator: str, count: int, index: int) -> list[str]:
    named = {"coordinator": coordinator, "num-processes": count, "process-id": index}
    return [f"--{name}={value}" for name, value in named.items()] if count > 1 else []


def logged(path: Path, name: str = "loss") -> list[float]:
    steps = map(json.loads, path.read_text().splitlines())
    return [step[name] for step in steps if name in step]


@pytest.mark.slow
def test_two_processes_train_save_and_evaluate_as_one_also_interrupted(
    config, tmp_path
):
    together, alone = tmp_path / "two.jsonl", tmp_path / "one.jsonl"
    # Every save is followed by a step at once, whose collectives it must not meet.
    every = ("run.checkpoint_every=3", "run.evaluate_every=6", "run.evaluate_batches=2")
    options = ("--steps", str(STEPS), *sets(*every))
    both = (*options, "--metrics", str(together))
    ended = train(config, *both, deeds=("nothing", "interrupted"), at_step=STEPS - 1)
    for process in ended:
        assert process.code == INTERRUPTED, process.output
    assert f"/checkpoints/{STEPS - 1}, after step {STEPS - 1}" in ended[0].output
    assert "run.resume=true" in ended[0].output

    resume = sets("run.resume=true")
    first, second = train(config, *both, *resume, deeds=("nothing",) * 2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert f"Resuming after step {STEPS - 1}" in first.output
    assert f"step {STEPS}/{STEPS}" in first.output
    assert "step" not in second.output, "only the first process speaks"

    (one,) = train(config, *options, "--metrics", str(alone), deeds=("nothing",))
    assert one.code == 0, one.output
    for name, count in {"loss": STEPS, "evaluation_loss": STEPS // 6}.items():
        assert len(logged(together, name)) == count
        assert logged(together, name) == pytest.approx(
            logged(alone, name), rel=RELATIVE
        )


@pytest.mark.slow
def test_a_full_drive_of_the_one_that_writes_ends_both_and_keeps_what_was_saved(config):
    every = sets("run.checkpoint_every=2")
    ended = train(config, *every, deeds=("full", "nothing"), at_step=3)
    assert [one.code for one in ended] == [USER_ERROR, ENDED_BY_ANOTHER]
    for process in ended:
        assert re.search("Cannot save param/.*File too large", process.output)
    (one,) = train(config, "--steps", "3", *sets("run.resume=true"), deeds=("nothing",))
    assert one.code == 0, one.output
    assert "Resuming after step 2" in one.output


@pytest.mark.slow
def test_a_kill_leaves_no_half_written_checkpoint(config):
    every = sets("run.checkpoint_every=1")
    ended = train(config, *every, deeds=("nothing", "killed"), at_step=3)
    assert [one.code for one in ended] == [ENDED_BY_ANOTHER, -signal.SIGKILL]
    assert "Process 1 of 2 is lost" in ended[0].error
    assert "'step 3'" in ended[0].error
    # On one process, as the number of devices may change with what is left of them.
    more = ("--steps", "3", *sets("run.resume=true"))
    (one,) = train(config, *more, deeds=("nothing",))
    assert one.code == 0, one.output
    assert re.search("Resuming after step [12]", one.output)


def test_processes_with_different_configs_end_before_anything_is_opened(config):
    at = f"127.0.0.1:{free_port()}"
    run = ("nothing", "0", "train", str(config), "--set")
    seeds = (("run.seed=1",), ("run.seed=2",))
    lines = [[*run, *seeds[i], *place(at, 2, i)] for i in range(2)]
    for process in run_all("command", lines):
        assert process.code == ENDED_BY_ANOTHER, process.output
        assert "run.seed: 1 on process 0; 2 on process 1" in process.error
        assert "plan" not in process.output
