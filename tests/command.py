"""Runs the command `zinf` in the process of the test."""

from typer.testing import CliRunner, Result


def run(*arguments: object, code: int | None = 0) -> Result:
    """What `zinf` says and how it ends.

    Args:
        code: the exit code that it must have; None for any.
    """
    # Imports much, and torch must come first where a test needs it.
    from zinf.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert code is None or result.exit_code == code, result.output
    return result
