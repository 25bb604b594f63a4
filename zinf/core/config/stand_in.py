"""Optimizers that zinf lacks, and which ones replace them if a config says
`ignore_unsupported`."""

import copy
from collections.abc import Mapping
from typing import Any

from zinf.core.config.arguments import section_at
from zinf.core.config.messages import Notice

STAND_INS = {
    # The same update rules, with learning rates that depend on each layer's width.
    "MuAdam": "Adam",
    "MuAdamW": "AdamW",
    "MuSGD": "SGD",
}


def with_stand_in(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Notice]]:
    """The config with an optimizer that zinf has, and a notice if it was replaced."""
    section = section_at(raw, ("optimizer",))
    asked = str(section and section.get("type"))
    by_lower_case = {name.lower(): name for name in STAND_INS}
    if asked.lower() not in by_lower_case:
        return dict(raw), []
    other = STAND_INS[by_lower_case[asked.lower()]]
    changed = copy.deepcopy(dict(raw))
    changed["optimizer"]["type"] = other
    text = f"{asked} is not supported yet; {other} trains in its place."
    return changed, [Notice(("optimizer", "type"), text)]
