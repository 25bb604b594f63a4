"""Runs plans: one worker per link; every error names the instruction that failed."""

from zinf.core.step.run.run import StepRecord as StepRecord
from zinf.core.step.run.run import Work as Work
from zinf.core.step.run.run import run_plan as run_plan
from zinf.core.step.run.runner import AbstractRunner as AbstractRunner
