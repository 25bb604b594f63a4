"""Configs of several engines in one process, which share the budgets of one."""

from collections.abc import Mapping
from pathlib import Path

from zinf.core.config import Config
from zinf.core.memory.nvme.root import INNER
from zinf.core.program import Tier


def in_own_folders(config: Config, number: int = 1) -> Config:
    """A config with NVMe folders of its own, inside those of the other engine.

    Args:
        number: of the engines that run beside the one with the config, from 1.
    """
    inner = Path(*[INNER] * number)
    folders = tuple(folder / inner for folder in config.nvme_paths or ())
    memory = config.memory.model_copy(update={"nvme": folders or None})
    return config.model_copy(update={"memory": memory})


def within(config: Config, budgets: Mapping[Tier, int]) -> Config:
    """A config with these budgets."""
    nvme = budgets[Tier.NVME] if config.nvme_paths else None
    named = {"device": budgets[Tier.DEVICE], "host": budgets[Tier.HOST]}
    memory = config.memory.model_copy(update=named | {"nvme_capacity": nvme})
    return config.model_copy(update={"memory": memory})
