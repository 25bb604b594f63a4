"""What models of `transformers` are trained to do: a module for each objective."""

from importlib import import_module

from zinf.core.config import Config
from zinf.hf.objectives.objective import Objective

WITH_IMAGES = "zinf.hf.images.objective"


def objective_of(config: Config) -> Objective:
    """The record of the objective of a config, of `zinf.core.objectives.OBJECTIVES`."""
    own = f"{__name__}.{config.data.objective}"
    return import_module(own if config.data.images is None else WITH_IMAGES).OBJECTIVE
