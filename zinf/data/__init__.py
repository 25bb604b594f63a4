"""Data for the shipped configs: text that every machine has."""

from zinf.data.share import Share as Share
from zinf.data.text import find_files as find_files
from zinf.data.text import text_dataset as text_dataset
