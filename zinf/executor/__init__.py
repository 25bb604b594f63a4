"""Runs plans: one worker per link; every error names the instruction that failed."""

from zinf.executor.run import StepRecord as StepRecord
from zinf.executor.run import Work as Work
from zinf.executor.run import run_plan as run_plan
from zinf.executor.runner import AbstractRunner as AbstractRunner
from zinf.executor.runners import make_runner as make_runner
