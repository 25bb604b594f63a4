"""The command line trains, plans and checks, and says what is wrong in one message."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import typer.main
import yaml
from rich.text import Text
from safetensors.numpy import load_file

from tests.command import run as zinf
from tests.golden import Golden
from tests.runs import Runs
from tests.tiers import stage_3
from zinf.checkpoint import Saved
from zinf.cli import app
from zinf.cli.errors import clean_errors
from zinf.cli.gpt_task import gpt_config
from zinf.core.config import Config
from zinf.core.interchange import find
from zinf.core.plan import InfeasibleError
from zinf.core.program import ArrayId, Role
from zinf.observe.record import read_record
from zinf_kernels import absent_gpu


def settings(*keys: str) -> tuple[str, ...]:
    return tuple(part for key in keys for part in ("--set", key))


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
        "zero_optimization": stage_3("nvme"),
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


@pytest.fixture
def fused(config: dict[str, Any], tmp_path: Path) -> Path:
    """The same on the device alone, for what does not depend on where arrays rest."""
    for key in ("segment", "zero_optimization", "memory", "persistence_threshold"):
        del config[key]
    return write(tmp_path / "fused.yaml", config | {"execution": "fused"})


def metrics_in(path: Path, key: str = "step") -> list[Any]:
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def test_training_says_what_it_did_and_continues_when_told_to(
    file: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = zinf("train", file, "--steps", 2, "--metrics", metrics)
    assert read_record(tmp_path / "out").has_measured_rates
    for words in (
        "parameters, 64 tokens a step, float32",
        "step 2/2",
        "2 steps in",
        "tokens/s",
        "held at most",
        "moved per step",
        f"The last checkpoint is {tmp_path / 'out' / 'checkpoints' / '2'}",
        f"The metrics of each step are in {metrics}",
    ):
        assert words in first.stdout
    assert first.stderr == ""
    more = settings("run.resume=true", "rates=fixed")
    resumed = zinf("train", file, "--steps", 3, "--metrics", metrics, *more)
    assert "Resuming after step 2." in resumed.stdout
    assert metrics_in(metrics) == [1, 2, 3]
    assert not read_record(tmp_path / "out").has_measured_rates


# What a resumed run must not change without a word, and what the error calls it.
OTHERS = {
    "model.num_heads=4": "model.num_heads: 2 -> 4",
    "run.seed=7": "run.seed: default -> 7",
    "train_batch_size=2": "train_batch_size: 4 -> 2",
    "data.sequence_length=8": "data.sequence_length: 16 -> 8",
    "data.seed=1": "data.seed: default -> 1",
    "optimizer.params.lr=0.5": "optimizer.params.lr: 0.01 -> 0.5",
    "data.paths=[{other}]": "data.content: ",
}


def test_a_resumed_run_is_the_same_run_unless_changes_are_allowed(
    fused: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    zinf("train", fused, "--steps", 1)
    (tmp_path / "other.txt").write_bytes(text.read_bytes()[::-1])
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    again = ("train", fused, "--steps", 2, *settings("run.resume=true"))
    for key, said in OTHERS.items():
        given = settings(key.format(other=tmp_path / "other.txt"))
        refused = zinf(*again, *given, code=2)
        assert f"  {said}" in refused.stderr, refused.output
        assert refused.stderr.count(" -> ") == 2  # One of them is in the heading.
        name = said.partition(":")[0]
        assert f"add --allow-changed {name}" in refused.stderr
    # Another text of the same name, length and time.
    about, content = text.stat(), text.read_bytes()
    text.write_bytes(content[::-1])
    os.utime(text, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert "  data.content: " in zinf(*again, code=2).stderr
    text.write_bytes(content)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    # Where arrays rest is no change, and a change that is allowed is recorded.
    other = settings("optimizer.params.lr=0.5", "memory.host=1GiB")
    done = zinf(*again, *other, "--allow-changed", "optimizer")
    assert "other settings: optimizer.params.lr 0.01 -> 0.5." in done.stdout
    changed = {"optimizer.params.lr": [0.01, 0.5]}
    assert read_record(out).changes == [{"after_step": 1, "changed": changed}]


HOLD = """
import sys
from pathlib import Path
from zinf.core.memory.lock_file import lock_of_folder, locked
with locked({Path(sys.argv[1]): lock_of_folder(Path(sys.argv[1]))}, change="wait"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_and_told_who_has_it(
    fused: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, out],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for command in (("train", fused), ("checkpoint", "import", tmp_path, fused)):
            refused = zinf(*command, code=2)
            host = socket.gethostname()
            assert f"in use by process {other.pid} on host {host} (" in refused.stderr
            assert [path.name for path in out.iterdir()] == ["run.lock"]
        other.kill()
    # A lock of a killed process holds nothing; afterwards there is none.
    zinf("train", fused, "--steps", 1)
    assert not [*out.rglob("*.lock")]


MISTAKES = {
    "output in the NVMe folder": (
        "run.output={folder}/nvme/arrays/out",
        "memory.nvme={folder}/nvme",
    ),
    "unknown key": ("run.stepz=3",),
    "wrong value": ("memory.host=lots",),
    "no text": ("data.paths=[/absent]",),
    "no batch size": ("train_batch_size=null",),
    "no model": ("model=null",),
    "no optimizer": ("optimizer=null", "scheduler=null"),
    "too little text": ("train_batch_size=999",),
    "output is a file": ("run.output={file}",),
    "an export": ("run.export=a",),
    "an adapter": ("run.export_adapter=a",),
    "too few devices": ("mesh.fsdp=512",),
}


def test_a_mistake_is_one_clean_message(
    golden: Golden, file: Path, tmp_path: Path
) -> None:
    texts = []
    for name, keys in MISTAKES.items():
        given = settings(*(key.format(file=file, folder=tmp_path) for key in keys))
        result = zinf("train", file, *given, code=2)
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output
        said = result.stderr.replace(str(tmp_path), "FOLDER").rstrip()
        said = said.replace(str(Path.cwd()), "HERE")
        said = re.sub(r"Allowed keys here: .*", "Allowed keys here: ...", said)
        texts.append(f"{name}\n  {said}")
    golden.check("mistakes.txt", "\n".join(texts))


def test_training_what_does_not_fit_ends_before_the_first_step(
    file: Path, tmp_path: Path
) -> None:
    tight = settings("memory.device=2KiB")
    result = zinf("train", file, *tight, code=1)
    assert result.stderr.startswith("error: The device budget is 2,048 bytes")
    assert not (tmp_path / "out").exists()
    # A traceback is shown on request.
    result = zinf("train", file, *tight, "--traceback", code=1)
    assert isinstance(result.exception, InfeasibleError)


@pytest.mark.parametrize(
    ("longest", "asked", "length"),
    [(16, None, 16), (None, 8, 8), (None, None, 256), (16, 8, 8), (512, None, 512)],
)
def test_a_model_and_its_data_have_a_length_for_each_other(
    config: dict[str, Any], longest: int | None, asked: int | None, length: int
) -> None:
    config["model"]["max_length"] = longest
    config["data"]["sequence_length"] = asked
    loaded = Config.load(config)
    assert loaded.sequence_length == length
    assert gpt_config(loaded).max_length == (longest or length)


def test_planning_prints_the_plan_and_makes_nothing(file: Path, tmp_path: Path) -> None:
    """An error in one file does not hide the plan of another."""
    before = sorted(tmp_path.iterdir())
    result = zinf("plan", tmp_path / "absent.yaml", file, code=2)
    assert "absent.yaml does not exist" in result.stderr
    assert "fits: " in result.stdout and "nvme read" in result.stdout
    assert "more instructions (--all prints them)" in result.stdout
    assert sorted(tmp_path.iterdir()) == before
    whole = zinf("plan", file, "--all").stdout
    assert "more instructions" not in whole and len(whole) > len(result.stdout)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("many", ("'many' is no topology", "v5p:8x8x8")),
        ("v9:4", ("'v9'", "catalogue", "h200")),
        ("h100:12", ("do not fill hosts of 8",)),
        ("h200:2", ("jax-cuda13-plugin",)),
    ],
)
def test_a_machine_that_cannot_be_is_an_error(topology, words, file, monkeypatch):
    monkeypatch.setattr(absent_gpu, "find_spec", lambda name: None)
    result = zinf("plan", file, "--topology", topology, code=2)
    for text in words:
        assert text in result.stderr


def test_a_checkpoint_of_a_run_is_evaluated_as_in_training(
    runs: Runs, file: Path, tmp_path: Path
) -> None:
    run, own = runs.nvme, settings(f"memory.nvme=[{tmp_path / 'nvme'}]")
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    wanted = {m["step"]: m.get("evaluation_loss") for m in map(json.loads, lines)}
    for step, options in ((8, ()), (4, ("--step", 4))):
        found = zinf("evaluate", run.config, *own, *options).stdout
        begin = f"{run.output}/checkpoints/{step}: loss {wanted[step]:.6g}, perplexity "
        assert found.startswith(begin)
        assert "128 tokens of 2 batches" in found
    # Six windows: two rows of the second batch of four only fill it.
    few = settings("run.evaluate_batches=null", "data.validation_fraction=0.0125")
    losses = []
    for rows, shown in ((4, "96 tokens of 2 batches"), (2, "96 tokens of 3 batches")):
        sized = settings(f"train_batch_size={rows}")
        found = zinf("evaluate", run.config, *own, *few, *sized).stdout
        assert shown in found
        losses.append(float(re.search(r"loss ([\d.]+)", found)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    absent = settings(f"run.output={tmp_path / 'absent'}")
    shown = zinf("evaluate", run.config, *absent, code=2)
    assert "There is no folder" in shown.output
    # A config names its data itself.
    for options in (("--data", file), ("--nvme", "x"), ("--base", "x")):
        assert "use --set" in zinf("evaluate", file, *options, code=2).output
    assert "--data FILE" in zinf("evaluate", "folder", code=2).output
    for option in ("--step", "--batches", "--weights"):
        shown = zinf("evaluate", "folder", option, 1, code=2)
        assert "config of a run" in shown.output


def test_a_run_goes_by_the_average_of_its_weights(fused: Path, tmp_path: Path) -> None:
    config, output = yaml.safe_load(fused.read_text()), tmp_path / "out"
    config["optimizer"]["ema"] = 0.5
    config["run"] |= {"evaluate_every": 3, "evaluate_batches": 2, "weights": "ema"}
    file = write(fused, config)
    zinf("train", file)
    last = (output / "metrics.jsonl").read_text().splitlines()[-1]
    wanted = json.loads(last)["evaluation_loss"]
    found = zinf("evaluate", file).stdout
    assert f"loss {wanted:.6g}, perplexity " in found
    trained = zinf("evaluate", file, "--weights", "master").stdout
    assert f"loss {wanted:.6g}" not in trained
    shown = zinf("evaluate", file, "--weights", "mean", code=2)
    assert "it has 'ema'" in shown.output
    checkpoints, folder = output / "checkpoints", tmp_path / "averages"
    zinf("checkpoint", "export", checkpoints, folder, "--weights", "ema")
    tensors = load_file(folder / "model.safetensors")
    with Saved(find(checkpoints)) as saved:
        paths = [array.path for array in saved.arrays if array.role == Role.PARAM]
        for path in paths:
            average = saved.read(ArrayId(Role.STATE, path, slot=2))
            np.testing.assert_array_equal(tensors[path.replace("/", ".")], average)
    without = settings("optimizer.ema=null")
    assert "set optimizer.ema" in zinf("train", file, *without, code=2).output


def test_a_trace_is_drawn_and_what_is_none_is_named(
    runs: Runs, file: Path, tmp_path: Path
) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "first.html"
    shutil.copy(runs.nvme.output / "trace.json", trace)
    shown = zinf("plot", trace).stdout
    assert shown == f"Step 3 is drawn in {tmp_path / 'trace.html'}.\n"
    assert "Step 3: " in (tmp_path / "trace.html").read_text()
    zinf("plot", trace, "--step", 1, "--output", output)
    assert "Step 1: " in output.read_text()
    result = zinf("plot", trace, "--step", 4, code=2)
    assert result.stderr == f"error: {trace} has no step 4. It has 1, 2, 3.\n"
    # The folder of the run will do.
    assert zinf("plot", tmp_path).stdout == shown
    result = zinf("plot", tmp_path / "absent.json", code=2)
    assert "No such file" in result.stderr and "absent.json" in result.stderr
    result = zinf("plot", file, code=2)
    assert result.stderr.startswith(f"error: {file} is damaged, or no trace of zinf")


def test_checking_a_config_has_a_line_for_each_key(config, tmp_path) -> None:
    config["zero_optimization"]["overlap_comm"] = True
    shown = zinf("config", "check", write(tmp_path / "checked.yaml", config)).stdout
    lines = [line.split() for line in shown.splitlines() if line]
    keys = [line[0] for line in lines]
    assert {"model.num_layers", "optimizer.params.lr"} <= {*keys}
    (overlap,) = [line for line in lines if "overlap_comm" in line[0]]
    assert "automatic" in overlap and "note: " in shown
    config["gradient_cliping"] = 1.0
    path = write(tmp_path / "checked.yaml", config)
    result = zinf("config", "check", path, code=2)
    assert "gradient_cliping" in result.stdout
    assert "error: gradient_cliping: unknown key" in result.stderr


# Slow: each trains, or plans more than once.


@pytest.mark.slow
def test_what_is_not_supported_is_left_out_if_asked_and_said_once(file: Path) -> None:
    keys = "amp={enabled: true}", "execution=fused", "zero_optimization={}"
    given = settings(*keys, "gradient_clipping=auto")
    for names in (("train",), ("plan",), ("config", "check")):
        result = zinf(*names, file, *given, code=2)
        assert "amp: not supported yet" in result.stderr
        result = zinf(*names, file, *given, "--ignore-unsupported")
        said = [line for line in result.stdout.splitlines() if line.startswith("note:")]
        assert sum("amp: left out. not supported yet" in line for line in said) == 1
        assert sum("gradient_clipping 1." in line for line in said) == 1
        assert "optimizer, scheduler" not in result.output


@pytest.mark.slow
def test_the_metrics_say_how_experts_are_used_on_any_mesh(config, tmp_path) -> None:
    config["model"] |= {"num_experts": [4, 8], "experts_per_token": 2}
    config["model"] |= {"capacity_factor": 1.0, "routing_group_size": 16}
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    config |= {"execution": "fused", "zero_optimization": {"stage": 2}}
    config["run"]["steps"] = 2
    lines = []
    for name, mesh in (("alone", {}), ("divided", {"fsdp": 1, "expert": 4})):
        config["mesh"], config["run"]["output"] = mesh, str(tmp_path / name)
        zinf("train", write(tmp_path / "experts.yaml", config))
        text = (tmp_path / name / "metrics.jsonl").read_text()
        lines.append([json.loads(line) for line in text.splitlines()])
    for step, same in zip(*lines, strict=True):
        for layer, count in (("blocks/0", 4), ("blocks/1", 8)):
            tokens = step[f"aux/experts/{layer}/tokens"]
            # Of each microbatch: 4 samples of 16 tokens, each with 2 experts.
            assert [len(row) for row in tokens] == [count] * 2
            assert [sum(row) for row in tokens] == [4 * 16 * 2] * 2
            dropped = step[f"aux/experts/{layer}/dropped"]
            assert all(0 < share < 1 for share in dropped)
            for name in ("tokens", "dropped"):
                key = f"aux/experts/{layer}/{name}"
                assert step[key] == same[key]
        assert step["loss"] == pytest.approx(same["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_mixed_folder_trains_and_what_is_skipped_is_said(config, tmp_path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    letters = (tmp_path / "text.txt").read_text()
    (folder / "a.txt").write_text(letters)
    (folder / "b.jsonl").write_text(json.dumps({"body": letters}) + "\n")
    (folder / "c.png").write_bytes(b"\x89PNG\0\0")
    # No sequence length either: the model takes fewer than the usual 256 tokens.
    config["data"] = {"paths": str(folder), "field": "body"}
    shown = zinf("train", write(tmp_path / "mixed.yaml", config), "--steps", 1).stdout
    for words in (
        "data: 1 skipped, binary, no text: c.png",
        f"is written to {tmp_path / 'out' / 'data'}",
        "64 tokens a step",
        "step 1/1",
    ):
        assert words in shown
    assert shown.count("data: 2 files (1 of text, 1 of JSON lines)") == 1
    np.full(4000, 300, np.uint16).tofile(tmp_path / "train.bin")
    config["data"] = {"paths": str(tmp_path / "train.bin")}
    file = write(tmp_path / "tokens.yaml", config)
    result = zinf("train", file, "--steps", 1, code=2)
    assert "error: The data has the token 300" in result.stderr
    zinf("train", file, "--steps", 1, *settings("model.vocab_size=301"))


@pytest.mark.slow
def test_a_new_run_keeps_all_of_the_one_before_under_one_number(file, tmp_path) -> None:
    output, events = tmp_path / "out", tmp_path / "events"
    result = zinf("train", file, "--trace", tmp_path, code=2)
    assert "The trace cannot be written" in result.stderr
    assert "step 1/" not in result.stdout
    shutil.rmtree(output, ignore_errors=True)
    (output / "run.1").mkdir(parents=True)  # that number is taken
    tensorboard = f"tensorboard={{enabled: true, output_path: {events}}}"
    trace = tmp_path / "trace.json"
    for steps in (1, 2):
        more = ("--trace", trace, *settings(tensorboard))
        shown = zinf("train", file, "--steps", steps, *more).stdout
    assert f"draw it with zinf plot {trace}" in shown
    assert f"are kept in {output / 'checkpoints.2'}" in shown
    assert f"are kept in {output / 'run.2'}" in shown
    assert (output / "checkpoints" / "2").exists()
    assert (output / "checkpoints.2" / "1").exists()
    assert metrics_in(output / "metrics.jsonl") == [1, 2]
    assert metrics_in(output / "run.2" / "metrics.jsonl") == [1]
    # One file of each run, and that of the first in a folder of its own.
    found = [path.parent.name for path in events.rglob("events.*")]
    assert len(found) == 2 and found.count("run.1") == 1


@pytest.mark.slow
def test_planning_names_tiled_weights_and_what_does_not_fit(file: Path) -> None:
    shown = zinf("plan", file, *settings("segment.max_bytes=2KiB")).stdout
    lines = shown.splitlines()
    listed = lines[lines.index("tiled:") + 1 :]
    # 16 x 64 float32 are 4 KiB.
    assert any("mlp" in x and "in 2 tiles of up to 8 rows" in x for x in listed)
    assert "as a segment may hold 2.00 KiB;  contracted" in shown
    shown = zinf("plan", file, file, *settings("memory.device=2KiB"), code=1).stdout
    assert shown.count("does not fit: The device budget is 2,048") == 2
    assert shown.count("(this suffices; less may)") == 2


@pytest.mark.gpu_compiler
def test_a_plan_for_another_machine_says_what_its_compiler_does(file: Path) -> None:
    keys = "execution=streamed", "train_batch_size=2", "persistence_threshold=1"
    shown = zinf("plan", file, "--topology", "h200:2", *settings(*keys)).stdout
    assert "all-gather" in shown and "reduce-scatter" in shown
    assert "compiled bytes are within 0." in shown


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_the_last_checkpoint(file, tmp_path) -> None:
    keys = settings("optimizer.params.lr=1e38", "run.checkpoint_every=1")
    result = zinf("train", file, "--steps", 50, *keys, code=2)
    assert result.stderr.startswith("error: The ")
    assert f"The last checkpoint is {tmp_path / 'out' / 'checkpoints'}" in result.stderr


def read_seconds(plan: str) -> float:
    """What the summary of a printed plan predicts for reads from the drive."""
    return seconds_in(next(x for x in plan.splitlines() if x.startswith("nvme read")))


def seconds_in(shown: str) -> float:
    """The first time that a text gives with its unit."""
    found = re.search(r"([\d.]+) (ms|s|min|h)\b", shown)
    assert found, shown
    return float(found[1]) * {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[found[2]]


@pytest.mark.slow
def test_a_drive_is_measured_and_plans_go_by_it(file, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("zinf.core.memory.nvme.measure.THREADS", (1, 8))
    monkeypatch.setattr("zinf.core.memory.nvme.measure.BLOCKS", (2**20, 2**24))
    result = zinf("bench", "io", tmp_path, "--seconds", "0")
    lines = result.stdout.splitlines()
    measured = [tuple(line.split()[:3]) for line in lines if " MiB " in line]
    assert measured == [(b, "MiB", t) for b in ("1", "16") for t in ("1", "8")]
    assert sum("chosen" in line for line in lines) == 1
    profile = tmp_path / "zinf-io.json"
    assert f"written to {profile}" in result.stdout
    slow = json.loads(profile.read_text()) | {"read_bytes_per_second": 1e3}
    before = zinf("plan", file).stdout
    profile.write_text(json.dumps(slow))
    after = zinf("plan", file).stdout
    assert read_seconds(after) > 1000 * read_seconds(before)
    missing = zinf("bench", "io", tmp_path / "missing", code=2)
    assert "missing" in missing.stderr


@pytest.mark.slow
def test_steps_are_measured_and_plans_go_by_them(config, file, tmp_path) -> None:
    rates = tmp_path / "rates.json"
    shown = zinf("bench", "step", file, "--output", rates, "--steps", 2).stdout
    names = {" ".join(x.split()[:2]) for x in shown.splitlines()}
    assert {"nvme read", "nvme write", "updates on", "a step"} <= names
    again = re.search(r"would be (.*) by these rates", shown)
    bound = re.search(r"less than (.*), with any memory", shown)
    assert again and bound, shown
    assert 0 < seconds_in(bound[1]) <= seconds_in(again[1])
    by_them = settings(f"rates={rates}")
    plans = [zinf("plan", file, *by_them).stdout]
    slow = json.loads(rates.read_text())
    slow["link_bytes_per_second"]["nvme read"] /= 1e4
    rates.write_text(json.dumps(slow))
    plans.append(zinf("plan", file, *by_them).stdout)
    assert read_seconds(plans[1]) > 1000 * read_seconds(plans[0])
    rates.unlink()
    assert "zinf bench step" in zinf("train", file, *by_them, code=2).stderr
    # A step without links is not measured.
    del config["zero_optimization"]
    fused = write(tmp_path / "fused.yaml", config)
    result = zinf("bench", "step", fused, "--output", rates, code=2)
    assert "execution=streamed" in result.stderr
    assert not rates.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_saves_and_says_how_to_continue(
    number: int, code: int, file: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    # A hangup is ignored by what `nohup` started, tests too.
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    program += "from zinf.cli import app; app()"
    arguments = ["train", str(file), "--steps=100000", f"--metrics={metrics}"]
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said = ""
        while "step 3/" not in said:
            said = process.stdout.readline()
            assert said, process.stderr.read()
        process.send_signal(number)
        said, errors = process.communicate(timeout=240)
    assert process.returncode == code
    assert "this step will be completed and saved" in errors
    assert "Traceback" not in errors

    last = metrics_in(metrics)[-1]
    assert f"{tmp_path / 'out' / 'checkpoints' / str(last)}, after step {last}." in said
    (line,) = [x for x in said.splitlines() if x.startswith("Continue with: ")]
    name, *given = shlex.split(line.removeprefix("Continue with: "))
    assert name == "zinf"
    zinf(*given, "--steps", last + 2)
    assert metrics_in(metrics) == list(range(1, last + 3))


def commands(command: Any, name: str = "zinf") -> Iterator[tuple[str, Any]]:
    """A command and those below it, by what calls them."""
    yield name, command
    for below, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {below}")


def test_help_shows_all_that_its_texts_say() -> None:
    """A word in brackets is markup, which is not shown."""
    for name, command in commands(typer.main.get_command(app)):
        texts = [command.help, *(getattr(p, "help", None) for p in command.params)]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text, name


def test_an_error_has_its_notes_but_those_on_frames_of_jax_and_grain(capsys) -> None:
    error = ValueError("what was asked")
    error.add_note("in instruction #3")
    error.add_note(
        "--------------------\nFor simplicity, Grain has removed its internal frames "
        "from the traceback of the following exception."
    )
    with pytest.raises(typer.Exit), clean_errors(False):
        raise error
    assert capsys.readouterr().err == "error: what was asked\nin instruction #3\n"
