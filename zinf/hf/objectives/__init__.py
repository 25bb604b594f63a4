"""What models of `transformers` are trained to do: a module for each objective."""

from importlib import import_module

from zinf.core.config import Config
from zinf.hf.objectives.objective import Objective

WITH_IMAGES = "zinf.hf.images.objective"


def objective_of(config: Config) -> Objective:
    """The record of the objective of a config, of `zinf.core.objectives.OBJECTIVES`."""
    found = import_module(f"{__name__}.{config.data.objective}").OBJECTIVE
    if config.data.images is None:
        return found
    return import_module(WITH_IMAGES).with_images(found)
