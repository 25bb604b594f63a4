"""`zinf train` and `zinf checkpoint export` with an adapter section."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.command import run
from tests.unit.interchange.test_cli import config_in
from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import find
from zinf.core.interchange.sources import parameters

MATRICES = 6  # of a block: query, key, value, out, up, down


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with adapters on a base in blocks of 4 bits, on nvme, in bfloat16."""
    folder = tmp_path_factory.mktemp("adapted")
    letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    adapter = {"r": 2, "lora_dropout": 0.1, "quantize_base": "nf4"}
    config = {**config_in(folder), "adapter": adapter}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    run("train", folder / "run.yaml")
    return folder


@pytest.mark.slow
def test_a_run_with_adapters_exports_them_and_its_weights_are_a_base(trained):
    config, saved = trained / "run.yaml", trained / "out" / "checkpoints"
    exports = {}
    for option, file in (("--adapter", "adapter_model"), ("--merge", "model")):
        folder = trained / file
        result = run("checkpoint", "export", saved, folder, option, config)
        exports[file] = load_file(folder / f"{file}.safetensors")
    alone, merged = exports["adapter_model"], exports["model"]
    assert len(alone) == 2 * MATRICES
    assert any(np.any(x) for name, x in alone.items() if "lora_B" in name)
    assert merged["blocks.0.attention.query.kernel"].shape == (16, 16)
    assert not any("lora" in name or "codes" in name for name in merged)
    # The merged weights become the base of another run.
    settings = ("--set", f"run.output={trained / 'next'}", "--set", "adapter={r: 2}")
    command = ("checkpoint", "import", trained / "model", config)
    result = run(*command, *settings, "--may-round")
    with Saved(find(trained / "next" / "checkpoints")) as saved:
        tensors = parameters(saved)
        path = "base/blocks/0/attention/query/kernel"
        found = tensors.read(path, whole_box(tensors.specs[path].shape))
    wanted = merged["blocks.0.attention.query.kernel"].astype(found.dtype)
    np.testing.assert_array_equal(found, wanted)
    result = run(*command, "--set", f"run.output={trained / 'other'}", code=2)
    assert "adapter.quantize_base needs" in result.stderr


@pytest.mark.slow
def test_a_plan_counts_the_trained_numbers_and_an_export_needs_the_config(trained):
    plain = run("plan", trained / "run.yaml", "--set", "adapter=null")
    adapted = run("plan", trained / "run.yaml")
    # bfloat16 copies, float32 masters, and two float32 moments.
    words = "14.00 bytes at rest a parameter: parameters 2.00, masters 4.00"
    assert words in plain.stdout
    assert "numbers are trained" in adapted.stdout, adapted.output
    config = yaml.safe_load((trained / "run.yaml").read_text())
    path = trained / "plain.yaml"
    path.write_text(yaml.safe_dump({**config, "adapter": None}))
    saved = trained / "out" / "checkpoints"
    result = run(
        "checkpoint", "export", saved, trained / "none", "--merge", path, code=2
    )
    assert "no adapter section" in result.stderr
