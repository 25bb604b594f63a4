"""What `zinf` runs first: it imports little, and ends without a traceback."""

import signal

from zinf.cli.endings import PIPE_CLOSED, exit_at_once, is_unread
from zinf.malloc import tune_malloc


def main() -> None:
    """Runs the command line and exits with its code.

    Until a command begins, an interrupt ends the process at once with one line: nothing
    is open yet. A KeyboardInterrupt could be lost inside an import, or leave a
    traceback of all modules that import one another.
    """
    # An interrupt that is ignored (nohup, a shell's background job) stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_at_once)
    try:
        # The process is ours.
        tune_malloc()
        from zinf.cli.app import app

        app()
    finally:
        if is_unread():
            raise SystemExit(PIPE_CLOSED)
