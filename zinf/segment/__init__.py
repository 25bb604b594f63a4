"""Cuts a loss function into segments that run one at a time."""

from zinf.segment.build import Segmented as Segmented
from zinf.segment.build import segment_loss as segment_loss
from zinf.segment.compile import Segment as Segment
from zinf.segment.compile import Workspace as Workspace
from zinf.segment.compile import compile_segments as compile_segments
from zinf.segment.modes import evaluated as evaluated
from zinf.segment.modes import for_evaluation as for_evaluation
from zinf.segment.modes import for_training as for_training
from zinf.segment.source import named_leaves as named_leaves
from zinf.segment.source import trace_loss as trace_loss
