"""Runs of several ways to train, over seeds: a line of a file each, rows of tables.

A run with the same settings that has a line is not done again.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

import zinf

Run = dict[str, Any]
# Where losses are compared, of all steps or tokens, and of all seconds.
SHARES = (0.25, 0.5, 0.75, 1.0)


def run_and_show(
    asked: argparse.Namespace,
    settings: Sequence[str],
    trained: Callable[[str, int, argparse.Namespace], Run],
    show: Callable[[list[Run]], None],
) -> None:
    """Do the runs that OUTPUT/runs.jsonl lacks, and show all that it has.

    Args:
        asked: with `ways`, `seeds`, `output`, `show` and the settings.
        settings: what two runs must have in common to be rows of one table.
        trained: `(way, seed, asked) -> a run`, with its way, seed and settings, and
            `curve`: points of (steps or tokens, seconds, validation loss).
        show: prints the table of runs with the same settings.
    """

    def settings_of(run: Run) -> tuple:
        return tuple(run[key] for key in settings)

    file = asked.output / "runs.jsonl"
    asked.output.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    if not asked.show:
        zinf.tune_malloc()
        done = {(run["way"], run["seed"], settings_of(run)) for run in found}
        # Seed by seed, so that a command that is stopped has all ways of some seeds.
        for seed in range(asked.seeds):
            for way in asked.ways:
                if (way, seed, settings_of(vars(asked))) in done:
                    continue
                run = trained(way, seed, asked)
                with file.open("a") as stream:
                    stream.write(json.dumps(run) + "\n")
                found.append(run)
                print(f"seed {seed}, {way}: loss {run['curve'][-1][2]:.4f}", flush=True)
    for common in dict.fromkeys(map(settings_of, found)):
        show([run for run in found if settings_of(run) == common])


def losses_at(runs: Sequence[Run], column: int, whole: float) -> list[str]:
    """Cells with the losses at each of `SHARES` of a whole.

    Args:
        column: 0, if the whole is a number of steps or tokens; 1, if of seconds.
    """
    return [cell([loss_at(run, column, s * whole) for run in runs], 3) for s in SHARES]


def loss_at(run: Run, column: int, place: float) -> float:
    """The validation loss at a number of steps or tokens (column 0) or seconds (1).

    Between two evaluations it is interpolated; before the first it is not known.
    """
    places = [point[column] for point in run["curve"]]
    values = [point[2] for point in run["curve"]]
    if place < places[0]:
        return math.nan
    if place >= places[-1]:
        return values[-1]
    return float(np.interp(place, places, values))


def cell(values: list[float], digits: int) -> str:
    """The median, and the range where values differ."""
    text = f"{median(values):,.{digits}f}"
    if max(values) > min(values):
        text += f" ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
    return text
