"""Cuts a function into segments that run one at a time."""

from zinf.segment.build import Segmented as Segmented
from zinf.segment.build import segment_function as segment_function
from zinf.segment.build import segment_loss as segment_loss
from zinf.segment.compile import Segment as Segment
from zinf.segment.compile import compile_segments as compile_segments
from zinf.segment.executables import Workspace as Workspace
from zinf.segment.function import Function as Function
from zinf.segment.function import evaluation_function as evaluation_function
from zinf.segment.function import user_function as user_function
from zinf.segment.modes import evaluated as evaluated
from zinf.segment.modes import for_evaluation as for_evaluation
from zinf.segment.modes import for_training as for_training
from zinf.segment.rows import rest_by_row as rest_by_row
from zinf.segment.source import named_leaves as named_leaves
from zinf.segment.source import trace_function as trace_function
from zinf.segment.source import trace_loss as trace_loss
