"""The configs that come with zinf."""

from pathlib import Path

import pytest

from zinf.config import Config, Status, report
from zinf.program import Tier

FOLDER = Path(__file__).parents[3] / "configs"
FILES = sorted(FOLDER.rglob("*.*"))


def test_there_are_configs():
    assert {"quickstart.yaml", "ds_zero3_nvme.json"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_config_is_valid_and_asks_for_nothing_unsupported(file):
    found = report(file)
    assert found.problems == ()
    refused = {Status.UNSUPPORTED, Status.UNKNOWN}
    assert not [row for row in found.rows if row.status in refused]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("quickstart", 0.010),
        ("gpt2_350m_nvme", 0.350),
        ("gpt_13b_1xh200", 13),
        ("gpt3_175b_1gpu_nvme", 175),
        ("llama_1b_host", 1.1),
        ("pods/gpt3_175b_v5p", 175),
        ("pods/gpt_1t_v5p", 1000),
    ],
)
def test_models_are_as_large_as_their_names(name, billions):
    model = Config.load(FOLDER / f"{name}.yaml").model
    width, kv_heads = model.embed_dim, model.num_kv_heads or model.num_heads
    attention = 2 * width**2 + 2 * width**2 * kv_heads // model.num_heads
    num_matrices = 3 if model.activation == "swiglu" else 2
    mlp = num_matrices * width * (model.mlp_dim or 4 * width)
    num_tables = 1 if model.tied_embeddings else 2
    embedding = num_tables * model.vocab_size * width
    total = model.num_layers * (attention + mlp) + embedding
    assert total == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize("name", ["quickstart", "gpt2_350m_nvme"])
def test_nvme_configs_keep_everything_on_nvme(name):
    config = Config.load(FOLDER / f"{name}.yaml")
    assert config.param_tier is config.optimizer_tier is Tier.NVME
    assert config.nvme_paths
