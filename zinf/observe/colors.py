"""One colour for each kind of instruction, wherever a step is drawn.

Each kind is told from every other on its row, and from white, also by readers who are
blind to red or green: a test computes how they see the colours.
"""

from collections.abc import Iterable

# What a device or the host computes. A pass that keeps residuals or goes on from them
# has the dark shade of the pass that it takes the place of.
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
# What links move. Norms are computed on the device and moved to the host.
MOVING = {
    "parameters": "#66B0F5",
    "parameters and state": "#DE981C",
    "gradients": "#DD5552",
    "optimizer state": "#F7CD86",
    "activations": "#968CA3",
}
COLORS = COMPUTING | MOVING
# Of a kind that this version of zinf does not know: a trace may be of a later one.
UNKNOWN = "#777777"


def colors(kinds: Iterable[str]) -> dict[str, str]:
    """The colours of these kinds, in the order of a legend."""
    present = set(kinds)
    known = {kind: color for kind, color in COLORS.items() if kind in present}
    return known | dict.fromkeys(sorted(present - COLORS.keys()), UNKNOWN)
