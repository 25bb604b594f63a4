"""A run with curricula that goes on with other processes has the batches of one."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.distributed.processes import free_port, run_all
from zinf.cli import app

LENGTH, KEPT, MICROBATCHES, NUM_BYTES = 16, 12, 2, 4_000
# Steps after which a run ends, and the processes that it has until then.
PARTS = ((4, 2), (9, 1))


def growing(low: int, high: int, steps: int, by: int, **changed: object) -> dict:
    config = {"total_curriculum_step": steps, "difficulty_step": by}
    return {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": config,
        **changed,
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text, index = tmp_path / "text.txt", tmp_path / "difficulty"
    letters = np.random.default_rng(0).geometric(0.2, NUM_BYTES).clip(1, 120)
    text.write_bytes(letters.astype(np.uint8).tobytes())
    asked = ["--metric", "vocabulary_rarity", "--sequence-length", str(LENGTH)]
    made = CliRunner().invoke(
        app, ["data", "analyze", str(text), *asked, "--output", str(index)]
    )
    assert made.exit_code == 0, made.output
    samples = f"{index}/vocabulary_rarity_index_to_sample"
    metrics = {
        "seqlen_truncate": growing(8, LENGTH, 4, 8),
        "rarity": growing(
            10, 100, 8, 1, index_to_sample_path=samples, difficulty_type="percentile"
        ),
    }
    schedule = {
        "min_value": KEPT,
        "max_value": KEPT,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 8, "seq_per_step": 4},
    }
    random_ltd = {
        "enabled": True,
        "random_ltd_layer_id": [0],
        "random_ltd_schedule": schedule,
    }
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    path = tmp_path / "config.json"
    raw = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": {
            "num_layers": 1,
            "num_heads": 1,
            "embed_dim": 8,
            "max_length": LENGTH,
        },
        "data": {"sequence_length": LENGTH, "paths": [str(text)]},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": sampling,
            "data_routing": {"enabled": True, "random_ltd": random_ltd},
        },
    }
    path.write_text(json.dumps(raw))
    return path


def batches(config: Path, output: str, *, until: int, processes: int) -> list:
    """Steps, shapes of leaves, and hashes of all rows by microbatch, of a run."""
    keys = (f"run.output={config.parent / output}", "run.resume=true")
    run = ["train", str(config), "--steps", str(until)]
    run += [part for key in keys for part in ("--set", key)]
    at = f"127.0.0.1:{free_port()}"
    group = ["--coordinator", at, "--num-processes", str(processes), "--process-id"]
    lines = [
        [
            str(config.parent),
            str(MICROBATCHES),
            *run,
            *([*group, str(i)] if processes > 1 else []),
        ]
        for i in range(processes)
    ]
    ended = run_all("batches", lines)
    for process in ended:
        assert process.code == 0, process.output
    found = [
        [
            json.loads(line.partition(" ")[2])
            for line in process.output.splitlines()
            if line.startswith("batch ")
        ]
        for process in ended
    ]
    together = []
    for shares in zip(*found, strict=True):
        ((step, shapes),) = {(s[0], json.dumps(s[1])) for s in shares}
        whole = [sum((s[2][m] for s in shares), []) for m in range(MICROBATCHES)]
        together.append((step, shapes, whole))
    return together


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_processes_has_the_batches_of_one(config):
    steps = PARTS[-1][0]
    undisturbed = batches(config, "one", until=steps, processes=1)
    assert [step for step, _, _ in undisturbed] == list(range(1, steps + 1))
    # Of 8 tokens none is dropped.
    shapes = dict.fromkeys(shapes for _, shapes, _ in undisturbed)
    assert list(shapes) == ["[[9]]", f"[[1, {KEPT}], [{LENGTH + 1}]]"]
    found = [
        batch
        for until, processes in PARTS
        for batch in batches(config, "parts", until=until, processes=processes)
    ]
    assert found == undisturbed
