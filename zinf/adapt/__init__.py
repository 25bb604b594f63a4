"""Trains small adapters beside frozen weights, for any loss."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.adapt.adapted import Adapted as Adapted
    from zinf.adapt.files import load_adapter as load_adapter
    from zinf.adapt.files import save_adapter as save_adapter
    from zinf.adapt.lora import adapt as adapt
    from zinf.adapt.lora import lora as lora
    from zinf.adapt.lora import quantize as quantize
    from zinf.adapt.merged import MergedTensors as MergedTensors

# Files need the libraries of `interchange`, which take long to import.
make_lazy(__name__)
