"""Every notebook runs from its first cell to its last with the checkout's zinf."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "1_larger_than_memory",
    "2_your_own_loss",
    "3_from_deepspeed",
    "4_plan_70b",
    "5_experts",
    "6_finetune_lora",
    "7_rewards",
]
NOTEBOOKS = [ROOT / f"scripts/notebooks/{name}.ipynb" for name in NAMES]
# Places of the machine on which a notebook was executed.
PATHS = re.compile(r"(?<![\w.])/(tmp|home|root|work|Users|var|usr)/")
# A reader gives a notebook five minutes; a cell that hangs must not hold the queue.
LIMIT_SECONDS = 300
MAX_CODE_CELLS = 12


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def readers_environment() -> dict[str, str]:
    """That of a reader: none of the settings that tests make for jax."""
    made_by_tests = ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION", "PYTHONWARNINGS")
    kept = {k: v for k, v in os.environ.items() if k not in made_by_tests}
    return kept | {"PYTHONPATH": str(ROOT)}


def test_the_notebooks_that_the_readme_promises_are_there_and_short():
    assert sorted((ROOT / "scripts/notebooks").glob("*.ipynb")) == NOTEBOOKS
    lengths = [len(code_cells(path)) for path in NOTEBOOKS]
    assert lengths[0] == 8
    assert 0 < min(lengths) and max(lengths) <= MAX_CODE_CELLS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_committed_as_one_run_left_it(path):
    """Its outputs are in order; none is an error, or names a path of that machine."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    for output in outputs:
        # Letters of a picture, which may be anything.
        output.get("data", {}).pop("image/png", None)
    assert not PATHS.search(json.dumps(outputs).replace(r"\n", "\n"))
    # The first cell installs nothing over what is there: the jax of a machine fits its
    # accelerator, and zinf may be a checkout on the path.
    source = "".join(cells[0]["source"])
    assert 'if importlib.util.find_spec("zinf") is None:' in source
    assert "%pip install" in source and "{kept}" in source
    assert cells[0]["outputs"] == []


@pytest.mark.notebook
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs_as_it_stands(path, tmp_path):
    import nbclient
    import nbformat

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
