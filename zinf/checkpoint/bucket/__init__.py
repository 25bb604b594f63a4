"""Checkpoints in object storage: s3://, gs:// and file://."""

from zinf.checkpoint.bucket.save import write_arrays as write_arrays
