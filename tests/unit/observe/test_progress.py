"""Progress is a bar on a terminal and a few plain lines anywhere else."""

import io

from tests.unit.observe.cases import metrics_of
from zinf.observe import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, steps: range, **settings: int) -> str:
    progress = Progress(file=file, **settings)
    for step in steps:
        progress.write(metrics_of(step))
    progress.close()
    return file.getvalue()


def steps_of(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines()]


def test_without_a_terminal_a_plain_line_comes_every_few_steps():
    text = shown(io.StringIO(), range(1, 9), num_steps=8, log_every=3)
    assert steps_of(text) == ["1/8", "3/8", "6/8", "8/8"]
    assert "loss -1.0000" in text and "\r" not in text


def test_a_resumed_run_shows_its_own_first_step():
    settings = {"num_steps": 8, "log_every": 100, "after_step": 5}
    text = shown(io.StringIO(), range(6, 9), **settings)
    assert steps_of(text) == ["6/8", "8/8"]


def test_an_evaluation_always_has_a_line():
    file = io.StringIO()
    progress = Progress(num_steps=100, log_every=10, file=file)
    progress.write(metrics_of(1))
    progress.write(metrics_of(2, evaluation_loss=1.5))
    progress.close()
    assert (
        "step 2/100" in file.getvalue() and "evaluation loss 1.5000" in file.getvalue()
    )


def test_what_is_unknown_is_left_out_and_a_skipped_step_says_so():
    file = io.StringIO()
    progress = Progress(num_steps=1, file=file)
    progress.write(metrics_of(1, grad_norm=None, learning_rate=None, skipped=True))
    progress.close()
    assert "None" not in file.getvalue() and "norm" not in file.getvalue()
    assert "skipped: gradients overflowed" in file.getvalue()


def test_on_a_terminal_there_is_a_bar_and_text_goes_above_it():
    file = Terminal()
    progress = Progress(num_steps=4, after_step=1, file=file)
    progress.write(metrics_of(2))
    progress.say("saved")
    progress.close()
    assert "2/4" in file.getvalue() and "loss 3.0000" in file.getvalue()
    assert "\nsaved\n" in file.getvalue().replace("\r", "\n")
