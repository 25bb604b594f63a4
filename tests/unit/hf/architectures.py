"""A tiny configuration of each architecture of the table."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

import transformers

from tests.unit.hf.models import SMALL

# Of each architecture, what its configuration has besides the sizes of `SMALL`. A
# configuration that names its sizes otherwise is given whole, below "whole". A second
# row of an architecture has its model_type below "of".
TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
# Whose layers do not go through `zinf_kernels.attention`, and why.
EAGER = "the class does not say that it takes functions (_supports_attention_backend)"
NONE = "it has no attention"
OWN_ATTENTION: dict[str, str] = dict.fromkeys(
    ("bloom", "falcon", "falcon_h1", "gpt_neo", "gpt_neox_japanese")
    + ("marian", "mpt", "stablelm", "zamba2"),
    EAGER,
) | dict.fromkeys(("mamba", "mamba2"), NONE)


def config_of(name: str) -> transformers.PretrainedConfig:
    """A new configuration of an architecture."""
    given = dict(TABLE[name])
    kind = transformers.CONFIG_MAPPING[given.pop("of", name)]
    return kind(**given.get("whole", SMALL | given))
