"""Figure 2a of the ZeRO-Infinity paper comes out of its formulas."""

import pytest
from typer.testing import CliRunner

from zinf.cli import app
from zinf.paper import MODELS
from zinf.paper.table import infinity_row

# Trillions of parameters, layers, hidden, heads, states, activations, checkpoints,
# working memory of the model and of activations.
FIGURE = (
    "0.10 80 10K 128 1.83 2.03 0.05 1.56 1.63",
    "0.50 100 20K 160 9.16 3.91 0.12 6.25 2.50",
    "1.01 128 25K 256 18.31 7.13 0.20 9.77 3.56",
    "10.05 195 64K 512 182.81 24.38 0.76 64.00 8.00",
    "101.47 315 160K 1024 1845.70 88.59 3.08 400.00 18.00",
)


@pytest.mark.parametrize(("model", "row"), [*zip(MODELS, FIGURE, strict=True)])
def test_figure_2a(model, row):
    assert " ".join(infinity_row(model)) == row


def test_parameters_are_those_of_a_layers_matrices():
    """Queries, keys and values; output; two of the MLP."""
    for model in MODELS:
        hd = model.hidden
        layer = hd * 3 * hd + hd * hd + hd * 4 * hd + 4 * hd * hd
        assert model.num_params == model.num_layers * layer


def test_plan_prints_the_tables_without_a_config():
    shown = CliRunner().invoke(app, ["plan", "--table"])
    assert shown.exit_code == 0
    words = shown.output.split()
    for figure in ("120", "31.41", "16.64", "1.875", "1845.70", "18.00"):
        assert figure in words


def test_plan_asks_for_a_config_or_the_tables():
    shown = CliRunner().invoke(app, ["plan"])
    assert shown.exit_code == 2
    assert "--table" in shown.output
