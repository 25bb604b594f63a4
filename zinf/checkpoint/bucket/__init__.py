"""Checkpoints in object storage: s3://, gs:// and file://."""
