"""What a run shows while it goes and when it ends."""

from zinf.observe.json_lines import JsonLines as JsonLines
from zinf.observe.progress import Progress as Progress
from zinf.observe.progress import Silence as Silence
from zinf.observe.summary import summary as summary
from zinf.observe.tensorboard import TensorBoard as TensorBoard
from zinf.observe.totals import Totals as Totals
from zinf.observe.trace import TraceFile as TraceFile
from zinf.observe.traced import read_trace as read_trace
from zinf.observe.writer import AbstractWriter as AbstractWriter
from zinf.observe.writer import Metrics as Metrics
