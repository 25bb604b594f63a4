"""What a run prints and writes; what cannot be written is left, and the run goes on."""

from contextlib import suppress
from pathlib import Path

from zinf.core.step.run import StepRecord
from zinf.core.text.complaint import complain
from zinf.observe import (
    AbstractWriter,
    Metrics,
    Progress,
    Silence,
    TraceFile,
)


class Output:
    """The lines, metrics and trace of a run, on its first process.

    Attributes:
        trace: a file for instructions of the first steps.
    """

    def __init__(self) -> None:
        self.trace: TraceFile | None = None
        self._writers: list[AbstractWriter] = []
        self._progress: Progress | Silence = Silence()
        self._failed: list[tuple[AbstractWriter | TraceFile, OSError]] = []

    def show(self, progress: Progress) -> None:
        self._progress = progress
        self._writers.append(progress)

    def add(self, writer: AbstractWriter, what: str, kept: Path | None) -> None:
        """Write to a file too; a line says where that of an earlier run is kept."""
        self._writers.append(writer)
        if kept is not None:
            earlier = f"{what} of an earlier run, of steps that are done anew"
            self.say(f"{earlier}, are in {kept}.")

    def say(self, text: str) -> None:
        """Print a line; on standard error once standard output takes nothing."""
        try:
            self._progress.say(text)
        except OSError as error:
            self._go_on_without(self._progress, error)
            self._progress.say(text)

    def write(self, metrics: Metrics, ran: StepRecord) -> bool:
        """Write the metrics of a step; true if a writer failed, see `go_on`."""
        for writer in self._writers:
            try:
                writer.write(metrics)
            except OSError as error:
                self._failed.append((writer, error))
        trace = self.trace
        if trace is not None and ran.plan is not None and ran.timeline is not None:
            try:
                trace.add(metrics["step"], ran.plan, ran.timeline)
            except OSError as error:
                self._failed.append((trace, error))
        return bool(self._failed)

    def go_on(self) -> None:
        """Leave the writers that failed."""
        failed, self._failed = self._failed, []
        for writer, error in failed:
            self._go_on_without(writer, error)

    def _go_on_without(
        self, writer: AbstractWriter | TraceFile, error: OSError
    ) -> None:
        """Close a file that takes no more, and say so on standard error."""
        if writer is self.trace:
            self.trace = None
        elif writer is self._progress:
            self._progress = Complaints()
        self._writers = [x for x in self._writers if x is not writer]
        with suppress(OSError):
            writer.close()
        complain(
            f"error: {writer.target} cannot be written: {error.strerror or error}. "
            "Training goes on without. To have them again, mend that and resume the "
            "run from a checkpoint."
        )

    def close_progress(self) -> None:
        self._close(self._progress)

    def close(self) -> None:
        for writer in [*self._writers, *([] if self.trace is None else [self.trace])]:
            self._close(writer)

    def _close(self, writer: AbstractWriter | TraceFile) -> None:
        try:
            writer.close()
        except OSError as error:
            self._go_on_without(writer, error)


class Complaints(Silence):
    """Progress once standard output has failed: lines go to standard error.

    Steps are no longer reported.
    """

    def say(self, text: str) -> None:
        complain(text)
