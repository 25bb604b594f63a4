"""Follows dims of a batch through a loss, and cuts its sequence over devices."""

from zinf.core.sharding.axes.sequence.cut import along_sequence as along_sequence
