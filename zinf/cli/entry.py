"""The entry point of the script `zinf`; it imports little and prints no traceback."""

import gc
import signal

from zinf.cli.endings import exit_at_once, lost_output, open_closed_streams
from zinf.core.process.malloc import tune_malloc
from zinf.core.process.uncollected import uncollected


def main() -> None:
    """Runs the command line and exits with its code.

    Until a command begins, nothing is open, so an interrupt ends the process at once
    with one line. A KeyboardInterrupt could get lost inside an import, or print a long
    traceback of nested imports.
    """
    open_closed_streams()
    # If the parent has set SIGINT to be ignored (nohup, a background job), keep that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    try:
        # The process is ours.
        tune_malloc()
        with uncollected():
            from zinf.cli.app import app

        app()
    finally:
        # The interpreter collects garbage as it ends, though all goes with the process.
        gc.freeze()
        code = lost_output()
        if code is not None:
            raise SystemExit(code)
