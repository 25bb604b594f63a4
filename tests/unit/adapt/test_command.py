"""`zinf train` and `zinf checkpoint export` with an adapter section."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from tests.unit.interchange.test_cli import config_in
from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.cli import app
from zinf.interchange import find
from zinf.interchange.sources import parameters

MATRICES = 6  # of a block: query, key, value, out, up, down


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with adapters on a base in blocks of 4 bits, on nvme, in bfloat16."""
    folder = tmp_path_factory.mktemp("adapted")
    letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    adapter = {"r": 2, "lora_dropout": 0.1, "quantize_base": "nf4"}
    config = {**config_in(folder), "adapter": adapter}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    result = run("train", folder / "run.yaml")
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.slow
def test_a_run_with_adapters_exports_them_alone_and_merged(trained):
    config, saved = trained / "run.yaml", trained / "out" / "checkpoints"
    result = run("checkpoint", "export", saved, trained / "alone", "--adapter", config)
    assert result.exit_code == 0, result.output
    alone = load_file(trained / "alone" / "adapter_model.safetensors")
    assert len(alone) == 2 * MATRICES
    assert any(np.any(x) for name, x in alone.items() if "lora_B" in name)
    result = run("checkpoint", "export", saved, trained / "merged", "--merge", config)
    assert result.exit_code == 0, result.output
    merged = load_file(trained / "merged" / "model.safetensors")
    assert merged["blocks.0.attention.query.kernel"].shape == (16, 16)
    assert not any("lora" in name or "codes" in name for name in merged)


@pytest.mark.slow
def test_a_plan_says_the_bytes_of_each_parameter(trained):
    plain = run("plan", trained / "run.yaml", "--set", "adapter=null")
    adapted = run("plan", trained / "run.yaml")
    # bfloat16 copies, float32 masters, and two float32 moments.
    assert "14.00 bytes at rest a parameter: parameters 2.00, masters 4.00" in (
        plain.stdout
    )
    assert "numbers are trained" in adapted.stdout, adapted.output


@pytest.mark.slow
def test_an_export_needs_the_config_of_the_run(trained):
    plain = trained / "plain.yaml"
    config = yaml.safe_load((trained / "run.yaml").read_text())
    plain.write_text(yaml.safe_dump({**config, "adapter": None}))
    saved = trained / "out" / "checkpoints"
    result = run("checkpoint", "export", saved, trained / "none", "--merge", plain)
    assert result.exit_code == 2
    assert "no adapter section" in result.stderr


@pytest.mark.slow
def test_a_base_is_imported_under_an_adapter(trained):
    """The merged weights of a run become the base of another one."""
    merged = trained / "merged"
    if not merged.exists():
        run(
            "checkpoint",
            "export",
            trained / "out" / "checkpoints",
            merged,
            "--merge",
            trained / "run.yaml",
        )
    settings = ("--set", f"run.output={trained / 'next'}", "--set", "adapter={r: 2}")
    result = run(
        "checkpoint",
        "import",
        merged,
        trained / "run.yaml",
        *settings,
        "--may-round",
    )
    assert result.exit_code == 0, result.output
    with Saved(find(trained / "next" / "checkpoints")) as saved:
        tensors = parameters(saved)
        path = "base/blocks/0/attention/query/kernel"
        found = tensors.read(path, whole_box(tensors.specs[path].shape))
    wanted = load_file(merged / "model.safetensors")
    wanted = wanted["blocks.0.attention.query.kernel"].astype(found.dtype)
    np.testing.assert_array_equal(found, wanted)
    settings = ("--set", f"run.output={trained / 'other'}")
    result = run("checkpoint", "import", merged, trained / "run.yaml", *settings)
    assert result.exit_code == 2 and "adapter.quantize_base needs" in result.stderr
