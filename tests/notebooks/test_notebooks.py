"""Every notebook runs from its first cell to its last with the checkout's zinf."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "scripts/notebooks").glob("*.ipynb"))
NAMES = [
    "1_larger_than_memory",
    "2_your_own_loss",
    "3_from_deepspeed",
    "4_plan_70b",
    "5_experts",
    "6_finetune_lora",
]
# Packages that a notebook needs beside zinf, by its name.
NEEDS = {"6_finetune_lora": "torchax"}
# Places of the machine on which a notebook was executed.
PATHS = re.compile(r"(?<![\w.])/(tmp|home|root|work|Users|var|usr)/")
# A reader gives a notebook five minutes; a cell that hangs must not hold the queue.
LIMIT_SECONDS = 300
MAX_CODE_CELLS = 12

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def readers_environment() -> dict[str, str]:
    """That of a reader: none of the settings that tests make for jax."""
    made_by_tests = ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION", "PYTHONWARNINGS")
    kept = {k: v for k, v in os.environ.items() if k not in made_by_tests}
    return kept | {"PYTHONPATH": str(ROOT)}


def test_the_notebooks_that_the_readme_promises_are_there():
    assert [path.stem for path in NOTEBOOKS] == NAMES


@each_notebook
def test_a_notebook_names_no_path_of_the_machine_that_executed_it(path):
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    for output in outputs:
        # Letters of a picture, which may be anything.
        output.get("data", {}).pop("image/png", None)
    assert not PATHS.search(json.dumps(outputs).replace(r"\n", "\n"))


def test_the_first_has_eight_cells():
    assert len(code_cells(NOTEBOOKS[0])) == 8


@each_notebook
def test_a_notebook_is_short(path):
    assert 0 < len(code_cells(path)) <= MAX_CODE_CELLS


@each_notebook
def test_the_first_cell_installs_nothing_over_what_is_there(path):
    """The jax of a machine fits its accelerator; zinf may be a checkout on the path."""
    first = code_cells(path)[0]
    source = "".join(first["source"])
    assert 'if importlib.util.find_spec("zinf") is None:' in source
    assert "%pip install" in source and "{kept}" in source
    assert first["outputs"] == []


@each_notebook
def test_a_notebook_is_committed_with_its_outputs(path):
    """They are those of one run in order, and none is an error."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.sampled(slow=6)
@pytest.mark.notebook
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@each_notebook
def test_a_notebook_runs_as_it_stands(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip(NEEDS.get(path.stem, "zinf"))
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_SECONDS, kernel_name="python3", resources=folder
    )
    # A cell that raises ends this with the cell and its traceback.
    client.execute(env=readers_environment())
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip():
            assert cell.execution_count
