"""The command line trains, plans and checks, and says what is wrong in one message."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from zinf.cli import app
from zinf.observe.record import read_record
from zinf.plan import InfeasibleError
from zinf_kernels import absent_gpu

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs `zinf` with these arguments, in this process."""
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A model that trains in a second, on the NVMe tier."""
    letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
    (tmp_path / "text.txt").write_bytes(letters.tobytes())
    return {
        "model": {"num_layers": 2, "num_heads": 2, "embed_dim": 16, "max_length": 16},
        "data": {"paths": [str(tmp_path / "text.txt")], "sequence_length": 16},
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "segment": {"remat": "always"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "memory": {"nvme": [str(tmp_path / "nvme")]},
        "persistence_threshold": 1,
        "run": {"steps": 3, "output": str(tmp_path / "out"), "log_every": 1},
    }


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def file(config: dict[str, Any], tmp_path: Path) -> Path:
    return write(tmp_path / "small.yaml", config)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def losses_in(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


UNSUPPORTED = ("--set", "amp={enabled: true}", "--set", "execution=fused")
ON_HOST = ("--set", "zero_optimization={}", "--set", "gradient_clipping=auto")


@pytest.mark.slow
def test_what_is_not_supported_is_left_out_if_asked_and_said_once(run, file):
    for command in ("train", "plan", ("config", "check")):
        names = (command,) if isinstance(command, str) else command
        result = run(*names, file, *UNSUPPORTED, *ON_HOST)
        assert result.exit_code != 0
        assert "amp: not supported yet" in result.stderr
        result = run(*names, file, *UNSUPPORTED, *ON_HOST, "--ignore-unsupported")
        assert result.exit_code == 0, result.output
        said = [line for line in result.stdout.splitlines() if line.startswith("note:")]
        assert sum("amp: left out. not supported yet" in line for line in said) == 1
        assert sum("gradient_clipping 1." in line for line in said) == 1
        assert "optimizer, scheduler" not in result.output


@pytest.mark.slow
def test_training_ends_by_saying_what_it_did(run, file, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    evaluating = ("--set", "run.evaluate_every=2", "--set", "run.evaluate_batches=2")
    result = run("train", file, "--steps", 4, "--metrics", metrics, *evaluating)
    assert result.exit_code == 0, result.output
    assert steps_in(metrics) == [1, 2, 3, 4]
    for words in (
        "parameters, 64 tokens a step, float32",
        "step 4/4",
        "4 steps in",
        "tokens/s",
        "held at most",
        "moved per step",
        f"The last checkpoint is {tmp_path / 'out' / 'checkpoints' / '4'}",
        f"The metrics of each step are in {metrics}",
    ):
        assert words in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_a_checkpoint_of_a_run_is_evaluated_as_in_training(run, file, tmp_path):
    rest = ("--set", "run.evaluate_every=2", "--set", "run.evaluate_batches=3")
    rest += ("--set", "run.checkpoint_every=2", "--set", "bf16.enabled=true")
    assert run("train", file, *rest).exit_code == 0
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    wanted = {m["step"]: m.get("evaluation_loss") for m in map(json.loads, lines)}
    for step, options in ((3, ()), (2, ("--step", 2))):
        found = run("evaluate", file, *rest, *options)
        assert found.exit_code == 0, found.output
        loss = f"{tmp_path}/out/checkpoints/{step}: loss {wanted[step]:.6g}, "
        assert found.stdout.startswith(f"{loss}perplexity ")
        assert "192 tokens of 3 batches" in found.stdout
    shown = run("evaluate", file, *rest, "--set", f"run.output={tmp_path / 'absent'}")
    assert shown.exit_code == 2 and "There is no folder" in shown.output


def test_a_config_to_evaluate_names_its_data_itself(run, file):
    for options in (("--data", file), ("--nvme", "x"), ("--base", "x")):
        assert "use --set" in run("evaluate", file, *options).output
    assert "--data FILE" in run("evaluate", "folder").output
    assert "config of a run" in run("evaluate", "folder", "--step", 1).output


@pytest.mark.slow
def test_the_metrics_say_how_experts_are_used_on_any_mesh(run, config, tmp_path):
    config["model"] |= {"num_experts": [4, 8], "experts_per_token": 2}
    config["model"] |= {"capacity_factor": 1.0, "routing_group_size": 16}
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    config |= {"execution": "fused", "zero_optimization": {"stage": 2}}
    config["run"]["steps"] = 2
    alone = write(tmp_path / "alone.yaml", config)
    config["mesh"] = {"fsdp": 1, "expert": 4}
    config["run"]["output"] = str(tmp_path / "divided")
    divided = write(tmp_path / "divided.yaml", config)
    lines = []
    for path, folder in ((alone, "out"), (divided, "divided")):
        result = run("train", path)
        assert result.exit_code == 0, result.output
        text = (tmp_path / folder / "metrics.jsonl").read_text()
        lines.append([json.loads(line) for line in text.splitlines()])
    for step, same in zip(*lines, strict=True):
        for layer, count in (("blocks/0", 4), ("blocks/1", 8)):
            tokens = step[f"aux/experts/{layer}/tokens"]
            # Of each microbatch: 4 samples of 16 tokens, each with 2 experts.
            assert [len(row) for row in tokens] == [count] * 2
            assert [sum(row) for row in tokens] == [4 * 16 * 2] * 2
            assert tokens == same[f"aux/experts/{layer}/tokens"]
            dropped = step[f"aux/experts/{layer}/dropped"]
            assert all(0 < share < 1 for share in dropped)
            assert dropped == same[f"aux/experts/{layer}/dropped"]
        assert step["loss"] == pytest.approx(same["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "measures"),
    [((), True), (("--set", "rates=fixed"), False)],
    ids=["default", "fixed"],
)
def test_training_measures_rates_unless_told_not_to(
    settings, measures, run, file, tmp_path
):
    result = run("train", file, "--steps", 1, *settings)
    assert result.exit_code == 0, result.output
    assert read_record(tmp_path / "out").has_measured_rates == measures


@pytest.mark.slow
def test_a_mixed_folder_trains_and_what_is_skipped_is_said(run, config, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    letters = (tmp_path / "text.txt").read_text()
    (folder / "a.txt").write_text(letters)
    (folder / "b.jsonl").write_text(json.dumps({"body": letters}) + "\n")
    (folder / "c.png").write_bytes(b"\x89PNG\0\0")
    # No sequence length either: the model takes fewer than the usual 256 tokens.
    config["data"] = {"paths": str(folder), "field": "body"}
    result = run("train", write(tmp_path / "mixed.yaml", config), "--steps", 1)
    assert result.exit_code == 0, result.output
    for words in (
        "data: 2 files (1 of text, 1 of JSON lines)",
        "data: 1 skipped, binary, no text: c.png",
        f"is written to {tmp_path / 'out' / 'data'}",
        "64 tokens a step",
        "step 1/1",
    ):
        assert words in result.stdout
    assert result.stdout.count("data: 2 files") == 1


@pytest.mark.slow
def test_tokens_that_the_model_lacks_end_the_run(run, config, tmp_path):
    np.full(4000, 300, np.uint16).tofile(tmp_path / "train.bin")
    config["data"] = {"paths": str(tmp_path / "train.bin")}
    file = write(tmp_path / "tokens.yaml", config)
    result = run("train", file, "--steps", 1)
    assert result.exit_code == 2
    assert "error: The data has the token 300" in result.stderr
    result = run("train", file, "--steps", 1, "--set", "model.vocab_size=301")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_traced_run_is_drawn(run, file, tmp_path):
    trace, output = tmp_path / "trace.json", tmp_path / "second.svg"
    result = run("train", file, "--trace", trace, "--trace-steps", 2)
    assert result.exit_code == 0, result.output
    assert f"draw it with zinf plot {trace}" in result.stdout
    result = run("plot", trace)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Step 2 is drawn in {tmp_path / 'trace.png'}.\n"
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    result = run("plot", trace, "--step", 1, "--output", output)
    assert result.exit_code == 0, result.output
    assert output.read_text().startswith("<?xml")
    result = run("plot", trace, "--step", 3)
    assert result.exit_code == 2
    assert result.stderr == f"error: {trace} has no step 3. It has 1, 2.\n"


def test_what_is_no_trace_cannot_be_drawn(run, file, tmp_path):
    result = run("plot", tmp_path / "absent.json")
    assert result.exit_code == 2
    assert "No such file" in result.stderr and "absent.json" in result.stderr
    result = run("plot", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file} is damaged, or no trace of zinf")


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_refused_before_training(run, file, tmp_path):
    result = run("train", file, "--trace", tmp_path)
    assert result.exit_code == 2
    assert "The trace cannot be written" in result.stderr
    assert "step 1/" not in result.stdout


@pytest.mark.slow
def test_a_run_is_continued_when_told_to(run, file, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    run("train", file, "--steps", 2, "--metrics", metrics)
    resumed = ("--set", "run.resume=true")
    result = run("train", file, "--steps", 4, "--metrics", metrics, *resumed)
    assert result.exit_code == 0, result.output
    assert "Resuming after step 2." in result.stdout
    assert steps_in(metrics) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_on_eight_devices_continues_on_two_as_if_undisturbed(run, file, tmp_path):
    moved, undisturbed = tmp_path / "moved.jsonl", tmp_path / "undisturbed.jsonl"

    def train(steps: int, devices: int, metrics: Path, *keys: str) -> Result:
        small = ("model.num_layers=1", "zero_optimization={stage: 3}", "memory={}")
        keys = (*small, "train_batch_size=8", f"mesh.fsdp={devices}", *keys)
        options = [part for key in keys for part in ("--set", key)]
        named = ("--steps", steps, "--metrics", metrics)
        result = run("train", file, *named, *options)
        assert result.exit_code == 0, result.output
        return result

    train(2, 8, moved)
    resumed = train(4, 2, moved, "run.resume=true")
    assert "Resuming after step 2." in resumed.stdout
    train(4, 8, undisturbed, f"run.output={tmp_path / 'other'}")
    assert steps_in(moved) == steps_in(undisturbed) == [1, 2, 3, 4]
    # Two devices sum in another order than eight, which changes a few of float32's last
    # bits of a gradient, and two steps of Adam carry that into the losses.
    assert losses_in(moved) == pytest.approx(losses_in(undisturbed), rel=16 * 2.0**-23)
    assert losses_in(moved)[:2] == losses_in(undisturbed)[:2]


@pytest.mark.slow
def test_a_new_run_keeps_all_of_the_one_before_under_one_number(run, file, tmp_path):
    output, events = tmp_path / "out", tmp_path / "events"
    (output / "run.1").mkdir(parents=True)  # that number is taken
    tensorboard = f"tensorboard={{enabled: true, output_path: {events}}}"
    for steps in (1, 2):
        result = run("train", file, "--steps", steps, "--set", tensorboard)
        assert result.exit_code == 0, result.output
    assert f"are kept in {output / 'checkpoints.2'}" in result.stdout
    assert f"are kept in {output / 'run.2'}" in result.stdout
    assert (output / "checkpoints" / "2").exists()
    assert (output / "checkpoints.2" / "1").exists()
    assert steps_in(output / "metrics.jsonl") == [1, 2]
    assert steps_in(output / "run.2" / "metrics.jsonl") == [1]
    # One file of each run, and that of the first in a folder of its own.
    found = [path.parent.name for path in events.rglob("events.*")]
    assert len(found) == 2 and found.count("run.1") == 1


def test_planning_prints_the_plan_and_makes_nothing(run, file, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = run("plan", file)
    assert result.exit_code == 0, result.output
    assert "fits: " in result.stdout and "nvme read" in result.stdout
    assert "... and " in result.stdout
    assert sorted(tmp_path.iterdir()) == before
    whole = run("plan", file, "--all").stdout
    assert "... and " not in whole and len(whole) > len(result.stdout)


@pytest.mark.slow
def test_planning_names_the_weights_that_are_read_by_tile_and_why(run, file):
    result = run("plan", file, "--set", "segment.max_bytes=2KiB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    listed = lines[lines.index("tiled:") + 1 :]
    # 16 x 64 float32 are 4 KiB.
    assert any("mlp" in x and "in 2 tiles of up to 8 rows" in x for x in listed)
    assert "as a segment may hold 2.00 KiB;  contracted" in result.stdout


@pytest.mark.slow
def test_the_exit_code_says_that_one_of_several_plans_does_not_fit(run, file):
    tight = ("--set", "memory.device=2KiB")
    result = run("plan", file, file, *tight)
    assert result.exit_code == 1
    assert result.stdout.count("does not fit: The device budget is 2,048") == 2
    assert result.stdout.count("Raise memory.device to at least") == 2


def test_an_error_in_one_file_does_not_hide_the_plan_of_another(run, file, tmp_path):
    result = run("plan", tmp_path / "absent.yaml", file)
    assert result.exit_code == 2
    assert "fits: " in result.stdout
    assert "absent.yaml does not exist" in result.stderr


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("many", ("'many' is no topology", "v5p:8x8x8")),
        ("v9:4", ("'v9'", "catalogue", "h200")),
        ("h100:12", ("do not fill hosts of 8",)),
    ],
)
def test_a_machine_that_cannot_be_is_an_error(run, file, topology, words):
    result = run("plan", file, "--topology", topology)
    assert result.exit_code == 2
    for text in words:
        assert text in result.stderr


def test_a_plan_for_another_machine_says_which_compiler_is_missing(
    run, file, monkeypatch
):
    monkeypatch.setattr(absent_gpu, "find_spec", lambda name: None)
    result = run("plan", file, "--topology", "h200:2")
    assert result.exit_code == 2
    assert "jax-cuda13-plugin" in result.stderr


@pytest.mark.gpu_compiler
def test_a_plan_for_another_machine_says_what_its_compiler_does(run, file):
    streamed = ("--set", "execution=streamed", "--set", "train_batch_size=2")
    stage = ("--set", "zero_optimization.stage=3", "--set", "persistence_threshold=1")
    result = run("plan", file, "--topology", "h200:2", *streamed, *stage)
    assert result.exit_code == 0, result.stderr
    assert "all-gather" in result.stdout and "reduce-scatter" in result.stdout
    assert "compiled bytes are within 0." in result.stdout


def test_too_few_devices_are_an_error_that_names_another_way(run, file):
    result = run("plan", file, "--set", "mesh.fsdp=512")
    assert result.exit_code == 2
    assert "512 devices" in result.stderr and "--topology" in result.stderr


def test_training_what_does_not_fit_ends_before_the_first_step(run, file, tmp_path):
    result = run("train", file, "--set", "memory.device=2KiB")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The device budget is 2,048 bytes")
    assert not (tmp_path / "out").exists()


MISTAKES = {
    "unknown key": (["run.stepz=3"], "Did you mean 'steps'?"),
    "wrong value": (["memory.host=lots"], "memory.host"),
    "no text": (["data.paths=[/absent]"], "no file or folder '/absent'"),
    "no batch size": (["train_batch_size=null"], "Set train_batch_size"),
    "no model": (["model=null"], "has no model section"),
    "no optimizer": (["optimizer=null", "scheduler=null"], "has no optimizer"),
    "too little text": (["train_batch_size=999"], "Give more text"),
    "output is a file": (["run.output={file}"], "Cannot make the folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clean_message(mistake, run, file):
    settings, words = MISTAKES[mistake]
    options = [f"--set={setting.format(file=file)}" for setting in settings]
    result = run("train", file, *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_traceback_is_shown_on_request(run, file):
    result = run("train", file, "--set", "memory.device=2KiB", "--traceback")
    assert isinstance(result.exception, InfeasibleError)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_the_last_checkpoint(run, file, tmp_path):
    settings = ("--set", "optimizer.params.lr=1e38", "--set", "run.checkpoint_every=1")
    result = run("train", file, "--steps", 50, *settings)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: The ")
    assert f"The last checkpoint is {tmp_path / 'out' / 'checkpoints'}" in result.stderr


@pytest.mark.slow
def test_a_drive_is_measured_and_plans_go_by_it(run, file, tmp_path, monkeypatch):
    monkeypatch.setattr("zinf.memory.nvme.measure.THREADS", (1, 8))
    monkeypatch.setattr("zinf.memory.nvme.measure.BLOCKS", (2**20, 2**24))
    result = run("bench", "io", str(tmp_path), "--seconds", "0")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    settings = [tuple(line.split()[:3]) for line in lines if " MiB " in line]
    blocks, threads = ("1", "16"), ("1", "8")
    assert settings == [(b, "MiB", t) for b in blocks for t in threads]
    assert sum("chosen" in line for line in lines) == 1
    profile = tmp_path / "zinf-io.json"
    assert f"written to {profile}" in result.stdout
    slow = json.loads(profile.read_text()) | {"read_bytes_per_second": 1e3}
    before = run("plan", str(file)).stdout
    profile.write_text(json.dumps(slow))
    after = run("plan", str(file)).stdout
    assert _read_seconds(after) > 1000 * _read_seconds(before)


def _read_seconds(plan: str) -> float:
    """What the summary of a printed plan predicts for reads from the drive."""
    line = next(x for x in plan.splitlines() if x.startswith("nvme read"))
    return _seconds(line)


def _seconds(shown: str) -> float:
    """The first time that a text gives with its unit."""
    found = re.search(r"([\d.]+) (ms|s|min|h)\b", shown)
    assert found, shown
    return float(found[1]) * {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[found[2]]


@pytest.mark.slow
def test_steps_are_measured_and_plans_go_by_them(run, file, tmp_path):
    rates = tmp_path / "rates.json"
    result = run("bench", "step", file, "--output", rates, "--steps", 2)
    assert result.exit_code == 0, result.output
    shown = {" ".join(x.split()[:2]) for x in result.stdout.splitlines()}
    assert {"nvme read", "nvme write", "updates on", "a step"} <= shown
    again = re.search(r"would be (.*) by these rates", result.stdout)
    assert again, result.stdout
    bound = re.search(r"less than (.*), with any memory", result.stdout)
    assert bound and 0 < _seconds(bound[1]) <= _seconds(again[1])
    by_them = ("--set", f"rates={rates}")
    # Another arrangement may be chosen, if it is no slower to speak of.
    planned = re.search(r"predicted (.*) a step", run("plan", file, *by_them).stdout)
    assert planned and _seconds(planned[1]) < 1.05 * _seconds(again[1])
    slow = json.loads(rates.read_text())
    slow["link_bytes_per_second"]["nvme read"] = 1e3
    rates.write_text(json.dumps(slow))
    after = run("plan", file, *by_them).stdout
    assert _read_seconds(after) > 1000 * _read_seconds(run("plan", file).stdout)
    rates.unlink()
    result = run("train", file, *by_them)
    assert result.exit_code == 2 and "zinf bench step" in result.stderr


@pytest.mark.slow
def test_a_step_without_links_is_not_measured(run, config, tmp_path):
    del config["zero_optimization"]
    file = write(tmp_path / "fused.yaml", config)
    result = run("bench", "step", file, "--output", tmp_path / "rates.json")
    assert result.exit_code == 2
    assert "execution=streamed" in result.stderr
    assert not (tmp_path / "rates.json").exists()


def test_a_folder_that_is_not_there_is_not_measured(run, tmp_path):
    result = run("bench", "io", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert "missing" in result.stderr


def test_checking_a_config_has_a_line_for_each_key(run, config, tmp_path):
    config["zero_optimization"]["overlap_comm"] = True
    result = run("config", "check", write(tmp_path / "checked.yaml", config))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    keys = [line[0] for line in lines if line]
    assert "model.num_layers" in keys and "optimizer.params.lr" in keys
    (overlap,) = [line for line in lines if line and "overlap_comm" in line[0]]
    assert "automatic" in overlap
    assert "note: " in result.stdout


def test_checking_a_config_that_cannot_be_loaded_fails(run, config, tmp_path):
    config["gradient_cliping"] = 1.0
    result = run("config", "check", write(tmp_path / "checked.yaml", config))
    assert result.exit_code == 2
    assert "gradient_cliping" in result.stdout
    assert "error: gradient_cliping: unknown key" in result.stderr


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_continue(run, file, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    code = "from zinf.cli import app; app()"
    arguments = ["train", str(file), "--steps=100000", f"--metrics={metrics}"]
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said = ""
        while "step 3/" not in said:
            said = process.stdout.readline()
            assert said, process.stderr.read()
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "this step will be completed and saved" in errors
    assert "Traceback" not in errors

    last = steps_in(metrics)[-1]
    assert f"{tmp_path / 'out' / 'checkpoints' / str(last)}, after step {last}." in said
    (line,) = [x for x in said.splitlines() if x.startswith("Continue with: ")]
    zinf, *given = shlex.split(line.removeprefix("Continue with: "))
    assert zinf == "zinf"
    result = run(*given, "--steps", last + 2)
    assert result.exit_code == 0, result.output
    assert steps_in(metrics) == list(range(1, last + 3))
