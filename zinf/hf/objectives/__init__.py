"""What models of `transformers` are trained to do: a module for each objective."""

from importlib import import_module

from zinf.hf.objectives.objective import Objective


def objective_of(name: str) -> Objective:
    """The record of an objective of `zinf.core.objectives.OBJECTIVES`."""
    return import_module(f"{__name__}.{name}").OBJECTIVE
