"""Parameters to and from other formats, and checkpoints compared."""

from zinf.interchange.safetensors_export import export_safetensors as export_safetensors
from zinf.interchange.safetensors_import import import_safetensors as import_safetensors
