"""Tables of the ZeRO and ZeRO-Infinity papers come out of their formulas."""

from pathlib import Path
from runpy import run_path

import pytest

PAPER = run_path(str(Path(__file__).parents[1] / "scripts/reports/paper.py"))
MODELS, model_state_bytes = PAPER["MODELS"], PAPER["model_state_bytes"]

# Figure 2a of ZeRO-Infinity: trillions of parameters, layers, hidden, heads, states,
# activations, checkpoints, working memory of the model and of activations.
FIGURE = (
    "0.10 80 10K 128 1.83 2.03 0.05 1.56 1.63",
    "0.50 100 20K 160 9.16 3.91 0.12 6.25 2.50",
    "1.01 128 25K 256 18.31 7.13 0.20 9.77 3.56",
    "10.05 195 64K 512 182.81 24.38 0.76 64.00 8.00",
    "101.47 315 160K 1024 1845.70 88.59 3.08 400.00 18.00",
)


@pytest.mark.parametrize(("model", "row"), [*zip(MODELS, FIGURE, strict=True)])
def test_figure_2a_of_zero_infinity(model, row):
    assert " ".join(model.row()) == row
    # Queries, keys and values; output; two of the MLP.
    hd = model.hidden
    layer = hd * 3 * hd + hd * hd + hd * 4 * hd + 4 * hd * hd
    assert model.num_params == model.num_layers * layer
    words = "\n".join(PAPER["tables"]()).split()
    assert {"120", "31.41", "16.64", "1.875", *row.split()} <= {*words}


@pytest.mark.parametrize(
    ("stage", "printed", "sent"),
    [(0, 120, 2), (1, 31.4, 2), (2, 16.6, 2), (3, 1.88, 3)],
)
def test_model_state_and_traffic_by_stage_are_those_of_zero(stage, printed, sent):
    """Figure 1: 7.5 billion parameters on 64 devices, in GB; and section 7."""
    found = model_state_bytes(7_500_000_000, stage, num_devices=64) / 1e9
    assert float(f"{found:.3g}") == printed
    # On one device no stage saves anything.
    assert model_state_bytes(1000, stage, num_devices=1) == 16 * 1000
    assert PAPER["sent_params"](stage) == sent
