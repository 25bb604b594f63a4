"""The progress of a run: a bar on a terminal, plain lines anywhere else."""

import sys
from typing import TextIO

from tqdm import tqdm

from zinf.observe.totals import counted
from zinf.observe.writer import AbstractWriter, Metrics


class Progress(AbstractWriter):
    """Shows steps as they are taken, up to `num_steps`.

    Args:
        after_step: number of steps taken before this run.
        log_every: without a terminal, one line per this many steps. The first step, the
            last step and each evaluation always have a line.
    """

    target = "The lines on standard output"

    def __init__(
        self,
        *,
        num_steps: int,
        after_step: int = 0,
        log_every: int = 1,
        file: TextIO | None = None,
    ) -> None:
        self._file = sys.stdout if file is None else file
        self._num_steps, self._log_every = num_steps, log_every
        self._first_step = after_step + 1
        self._bar = tqdm(
            total=num_steps,
            initial=after_step,
            file=self._file,
            disable=not self._file.isatty(),
            unit="step",
            dynamic_ncols=True,
        )

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        if not self._bar.disable:
            self._bar.set_postfix_str(_brief(metrics), refresh=False)
            self._bar.update()
        elif (
            step in (self._first_step, self._num_steps)
            or step % self._log_every == 0
            or "evaluation_loss" in metrics
        ):
            self.say(f"step {step}/{self._num_steps}  {_full(metrics)}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._bar.write(text, file=self._file)
        self._file.flush()

    def close(self) -> None:
        self._bar.close()


class Silence(AbstractWriter):
    """Progress that prints nothing, for all processes but process 0.

    Also for a process without standard output.
    """

    target = "Nothing"

    def write(self, metrics: Metrics) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def _brief(metrics: Metrics) -> str:
    reward = f"reward {metrics['reward']:.3g}, " if "reward" in metrics else ""
    text = f"loss {metrics['loss']:.4f}, {reward}{_rate(metrics)}"
    if "evaluation_loss" in metrics:
        text += f", evaluation {metrics['evaluation_loss']:.4f}"
    return text


def _full(metrics: Metrics) -> str:
    parts = [f"loss {metrics['loss']:.4f}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3g}")
    if metrics["grad_norm"] is not None:
        parts.append(f"gradient norm {metrics['grad_norm']:.3g}")
    if metrics["learning_rate"] is not None:
        parts.append(f"learning rate {metrics['learning_rate']:.3g}")
    parts.append(f"{metrics['step_seconds']:.2f} s")
    parts.append(_rate(metrics))
    if metrics.get("skipped"):
        parts.append("skipped: gradients are not finite")
    if "evaluation_loss" in metrics:
        parts.append(f"evaluation loss {metrics['evaluation_loss']:.4f}")
    return "  ".join(parts)


def _rate(metrics: Metrics) -> str:
    return f"{metrics['tokens_per_second']:,.0f} {counted(metrics)}/s"
