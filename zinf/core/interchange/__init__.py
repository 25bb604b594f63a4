"""Exports parameters to other formats, imports them, and compares checkpoints."""

from zinf.core.interchange.catalog import entries as entries
from zinf.core.interchange.catalog import find as find
from zinf.core.interchange.compare import differences as differences
from zinf.core.interchange.compare import scalar_differences as scalar_differences
from zinf.core.interchange.orbax_export import export_orbax as export_orbax
from zinf.core.interchange.orbax_import import import_orbax as import_orbax
from zinf.core.interchange.safetensors_export import (
    export_safetensors as export_safetensors,
)
from zinf.core.interchange.safetensors_import import (
    import_safetensors as import_safetensors,
)
