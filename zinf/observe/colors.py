"""One colour for each kind of instruction, the same in every picture of a step.

Readers with red or green colour blindness can distinguish each colour from white and
from every other colour on its row; a test simulates how they see the colours.
"""

from collections.abc import Iterable

# Kinds that compute on a device or the host. A pass that keeps or uses residuals has a
# dark shade of the pass that it replaces.
COMPUTING = {
    "forward": "#9DBBF2",
    "forward, keeping": "#1F5A9E",
    "backward": "#E39A90",
    "backward, kept": "#98406C",
    "loss": "#4F20B0",
    "whole step": "#1F5A9E",
    "update": "#2E9A1E",
    "decide": "#222222",
    "accumulate": "#A5DC52",
    "norm": "#5A4A08",
}
# Kinds of transfers. "norm" is above: a norm is computed and then also transferred.
MOVING = {
    "parameters": "#66B0F5",
    "parameters and state": "#DE981C",
    "gradients": "#DD5552",
    "optimizer state": "#F7CD86",
    "activations": "#968CA3",
    "caches": "#2828C8",
}
COLORS = COMPUTING | MOVING
# For kinds that this version does not know: a later version may have written the trace.
UNKNOWN = "#777777"


def colors(kinds: Iterable[str]) -> dict[str, str]:
    """The colours of these kinds, in the order of the legend."""
    present = set(kinds)
    known = {kind: color for kind, color in COLORS.items() if kind in present}
    return known | dict.fromkeys(sorted(present - COLORS.keys()), UNKNOWN)
