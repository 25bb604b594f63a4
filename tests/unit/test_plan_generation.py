"""`zinf plan --generate`: what generation costs, without weights."""

import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.command import run as zinf
from zinf.core.plan import show_bytes
from zinf.models import GPTConfig, num_parameters

MODEL = {"num_layers": 1, "num_heads": 2, "embed_dim": 32, "max_length": 64}
CONFIGS = Path(__file__).parents[2] / "configs"
LENGTHS = ("--prompt-length", 16, "--max-new-tokens", 6)


def budgets(*texts):
    return [x for text in texts for x in ("--set", f"memory.{text}")]


run = partial(zinf, "plan", "--generate")


@pytest.fixture
def file(tmp_path):
    config = {
        "model": MODEL,
        "train_batch_size": 6,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "persistence_threshold": 0,
        "memory": {"nvme": str(tmp_path / "nvme")},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def rows(found):
    """The lines of the table, as cells by the name of the column."""
    lines = found.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("batch  "))
    names = re.split(r"  +", lines[first].strip())
    cells = [re.split(r"  +", line.strip()) for line in lines[first + 1 :]]
    end = next(i for i, row in enumerate(cells) if len(row) != len(names))
    return [dict(zip(names, row, strict=True)) for row in cells[:end]]


def test_a_table_says_what_each_batch_costs_and_makes_nothing(file, tmp_path):
    found = run(file, *LENGTHS, "--batch-sizes", "8,16")
    count = num_parameters(GPTConfig(**MODEL))
    assert f"{count:,} parameters" in found.stdout
    assert f"weights at rest: {show_bytes(4 * count)} on nvme" in found.stdout
    table = rows(found)
    assert [row["batch"] for row in table] == ["8", "16"]
    assert "A batch of 8, 16: Streamed, because offload_param asks" in found.stdout
    for row in table:
        assert row["mode"] == "streamed" and row["tokens/s"] == row["streamed"]
        # All weights once, for any number of sequences.
        assert row["drive read"] == show_bytes(4 * count)
        # Keys and values of one layer, in 32 slots of 4-byte numbers.
        nbytes = int(row["batch"]) * 2 * 32 * MODEL["embed_dim"] * 4
        assert row["cache"] == show_bytes(nbytes)
        assert row["rests on"] == "device"
    assert "of weights at 3 GB/s are" in found.stdout
    assert sorted(x.name for x in tmp_path.iterdir()) == ["small.yaml"]


def test_lengths_that_are_not_given_leave_room_in_the_model(file):
    for given, said in (
        ((), "prompts of 32 tokens and 32 new ones"),
        (("--max-new-tokens", 10), "prompts of 54 tokens and 10 new ones"),
    ):
        assert said in run(file, *given, "--batch-sizes", "1").stdout


def test_a_mistake_is_one_clean_message(file):
    for options, message in (
        (("--batch-sizes", "8,many"), "takes whole numbers.*found '8,many'"),
        (("--batch-sizes", "0"), "at least 1"),
        (("--prompt-length", 60), "60 tokens.*more than the 64"),
        (("--set", "model=null"), "has no model section"),
        (
            ("--set", "mesh.fsdp=1", "--set", "mesh.seq=2"),
            r"mesh\.seq = 2 divides positions",
        ),
    ):
        found = run(file, *LENGTHS, *options, code=2)
        assert re.search(message, found.stderr, re.DOTALL)
    found = zinf("plan", file, "--weight-bits", "8", code=2)
    assert "--weight-bits is of --generate" in found.stderr


@pytest.mark.slow
def test_what_fits_the_device_has_the_times_of_both_modes(file):
    """By times of executables that are measured for it, and by rates."""
    fits = ("--set", "zero_optimization.offload_param=null", "--batch-sizes", "1,16")
    for rates in ("measured", "fixed"):
        found = run(file, *LENGTHS, *fits, "--set", f"rates={rates}")
        assert "A batch of 1, 16: Fused, because everything fits" in found.stdout
        for row in rows(found):
            assert row["mode"] == "fused" and row["binds"] == "device"
            assert float(row["tokens/s"]) > float(row["streamed"])
    streamed = run(file, *LENGTHS, *fits, "--set", "execution=streamed")
    assert "Streamed, because execution is 'streamed'" in streamed.stdout
    assert {row["mode"] for row in rows(streamed)} == {"streamed"}


@pytest.mark.slow
def test_weights_in_four_bits_are_fewer_bytes_at_rest_and_on_the_drive(file):
    whole, few = (
        rows(run(file, *LENGTHS, "--batch-sizes", 8, *bits))[0]
        for bits in ((), ("--weight-bits", 4))
    )
    count, width = num_parameters(GPTConfig(**MODEL)), MODEL["embed_dim"]
    # Four of attention, and two of the MLP; 4 bits and 8 bytes for each 64 numbers.
    linear = (4 + 8) * width**2
    assert whole["drive read"] == show_bytes(4 * count)
    kept = 4 * (count - linear) + linear // 2 + 8 * linear // 64
    assert few["drive read"] == show_bytes(kept)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_said_with_the_bytes_that_it_needs(file):
    tight = budgets("device=256KiB", "host=256KiB", "nvme_capacity=256KiB")
    found = run(file, *LENGTHS, *tight, "--batch-sizes", "1,512")
    assert [row["batch"] for row in rows(found)] == ["1"]
    message = r"a batch of 512 does not fit: The \w+ budget is 262,144"
    assert re.search(message, found.stdout)
    none = run(file, *LENGTHS, *budgets("device=2KiB"), code=1)
    assert "does not fit: The device budget is 2,048 bytes" in none.stdout


@pytest.mark.gpu_compiler
def test_175b_parameters_on_one_h200_with_128_gb_of_host_memory():
    """The drive binds, though most weights rest on device and host."""
    options = budgets("device=null", "host=128GB", "nvme_capacity=6TB")
    for section in ("offload_param", "offload_optimizer"):
        options += ["--set", f"zero_optimization.{section}=null"]
    path = CONFIGS / "gpt3_175b_1gpu_nvme.yaml"
    where = ("--topology", "h200:1", "--batch-sizes", "8,64")
    found = run(path, *where, *options, "--prompt-length", 512)
    assert "174,604,836,864 parameters, 325 GiB" in found.stdout
    small, large = rows(found)
    assert small["binds"] == large["binds"] == "nvme read"
    for row in (small, large):
        assert 0 < float(row["tokens/s"]) < float(row["at most"])
    # Eight times the sequences, and weights are read once all the same.
    bound = 8 * float(small["at most"])
    assert float(large["at most"]) == pytest.approx(bound, rel=0.01)
    assert float(large["tokens/s"]) > 2 * float(small["tokens/s"])
