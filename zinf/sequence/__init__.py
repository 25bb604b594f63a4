"""Follows dims of a batch through a loss, and cuts its sequence over devices."""

from zinf.sequence.cut import along_sequence as along_sequence
