"""A shared run, by the names of what it left."""

from pathlib import Path

import pytest

from tests.runs import Runs


@pytest.fixture(scope="session")
def small_config(runs: Runs) -> Path:
    return runs.nvme.config


@pytest.fixture(scope="session")
def run_folder(runs: Runs) -> Path:
    return runs.nvme.output
