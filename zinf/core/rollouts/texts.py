"""Metrics and texts of rollouts, beside the metrics of steps."""

import json
import logging
from pathlib import Path
from typing import Any

from zinf.core.rl import metric_values
from zinf.observe import JsonLines

logger = logging.getLogger(__name__)


class Told:
    """Adds metrics of a rollout to those of the next step, and writes its texts.

    Args:
        path: of the file of texts. If it cannot be written, a warning says so.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._metrics: dict[str, float] = {}
        self._lines: list[dict[str, Any]] = []
        self._is_begun = False

    def of_rollout(
        self, metrics: dict[str, float], lines: list[dict[str, Any]]
    ) -> None:
        self._metrics, self._lines = metrics, lines

    def after_step(self, metrics: dict[str, Any]) -> None:
        """For `Hook`: add metrics to a step's, and write the texts of its rollout."""
        step = metrics["step"]
        metrics |= metric_values(metrics.pop("aux", {}))
        metrics |= self._metrics
        self._metrics = {}
        lines = [json.dumps({"step": step} | line) for line in self._lines]
        self._lines = []
        if self._path is None:
            return
        try:
            if not self._is_begun:
                # Lines of steps that this run repeats are moved away.
                JsonLines(self._path, after_step=step - 1).close()
                self._is_begun = True
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            logger.warning(
                f"Completions are no longer written to {self._path}: {error}. "
                "Training goes on."
            )
            self._path = None
