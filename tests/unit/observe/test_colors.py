"""Kinds of instructions are told apart by their colours, also by the colour-blind."""

from itertools import combinations

import numpy as np
import pytest

from zinf.core.plan import Pass
from zinf.observe.colors import COLORS, COMPUTING, MOVING, colors

# How linear RGB is seen: without defect, without red, and without green receptors
# (Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of
# color vision deficiency", 2009, severity 1).
VISIONS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
# From linear RGB to XYZ, and the white of it (sRGB, D65).
XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)
WHITE = XYZ.sum(axis=1)
# In CIELAB, where 2.3 is just noticeable. Bars are small and lie side by side.
LEAST_DISTANCE = 20.0


def seen(color: str, vision: np.ndarray) -> np.ndarray:
    """The colour in CIELAB, as somebody with this vision sees it."""
    rgb = np.frombuffer(bytes.fromhex(color.removeprefix("#")), np.uint8) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(vision @ linear, 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_that_share_a_row_are_told_apart(vision):
    matrix = VISIONS[vision]
    paper = {"paper": "#FFFFFF"}
    # A step that is one executable has no other kinds.
    computing = {k: c for k, c in COMPUTING.items() if k != "whole step"}
    for group in (computing | paper, MOVING | paper | {"norm": COMPUTING["norm"]}):
        for (one, first), (two, second) in combinations(group.items(), 2):
            distance = np.linalg.norm(seen(first, matrix) - seen(second, matrix))
            assert distance >= LEAST_DISTANCE, (one, two, distance)


def test_every_pass_has_a_colour():
    assert set(map(str, Pass)) <= COLORS.keys()


def test_a_legend_has_the_kinds_that_there_are_in_one_order():
    assert list(colors(["update", "loss", "novelty"])) == ["loss", "update", "novelty"]
