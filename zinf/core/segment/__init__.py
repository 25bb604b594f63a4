"""Cuts a function into segments that run one at a time."""

from zinf.core.problem.function import Function as Function
from zinf.core.problem.function import evaluation_function as evaluation_function
from zinf.core.problem.function import user_function as user_function
from zinf.core.problem.modes import evaluated as evaluated
from zinf.core.problem.modes import for_evaluation as for_evaluation
from zinf.core.problem.modes import for_training as for_training
from zinf.core.problem.source import named_leaves as named_leaves
from zinf.core.problem.source import trace_function as trace_function
from zinf.core.problem.source import trace_loss as trace_loss
from zinf.core.segment.build import Segmented as Segmented
from zinf.core.segment.build import segment_function as segment_function
from zinf.core.segment.build import segment_loss as segment_loss
from zinf.core.segment.compile import Segment as Segment
from zinf.core.segment.compile import compile_segments as compile_segments
from zinf.core.segment.executables import Workspace as Workspace
from zinf.core.segment.instead import NOTHING as NOTHING
from zinf.core.segment.instead import Instead as Instead
from zinf.core.segment.instead import StateArray as StateArray
from zinf.core.segment.rows import rest_by_row as rest_by_row
