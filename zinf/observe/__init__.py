"""Output of a run: progress, metrics, traces, pictures and reports."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.observe.csv_files import CsvFiles as CsvFiles
    from zinf.observe.json_lines import JsonLines as JsonLines
    from zinf.observe.plot import plot_experts as plot_experts
    from zinf.observe.plot import plot_losses as plot_losses
    from zinf.observe.plot import plot_timeline as plot_timeline
    from zinf.observe.progress import Progress as Progress
    from zinf.observe.progress import Silence as Silence
    from zinf.observe.summary import summary as summary
    from zinf.observe.tensorboard import TensorBoard as TensorBoard
    from zinf.observe.totals import Totals as Totals
    from zinf.observe.trace import TraceFile as TraceFile
    from zinf.observe.traced import read_trace as read_trace
    from zinf.observe.writer import AbstractWriter as AbstractWriter
    from zinf.observe.writer import Metrics as Metrics

make_lazy(__name__)
