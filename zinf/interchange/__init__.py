"""Exports parameters to other formats, imports them, and compares checkpoints."""

from zinf.interchange.catalog import entries as entries
from zinf.interchange.catalog import find as find
from zinf.interchange.compare import differences as differences
from zinf.interchange.compare import scalar_differences as scalar_differences
from zinf.interchange.orbax_export import export_orbax as export_orbax
from zinf.interchange.orbax_import import import_orbax as import_orbax
from zinf.interchange.safetensors_export import export_safetensors as export_safetensors
from zinf.interchange.safetensors_import import import_safetensors as import_safetensors
