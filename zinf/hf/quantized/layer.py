"""Layers of a model, as the section of config.json on quantized weights names them."""

from dataclasses import dataclass

WEIGHT = ".weight"
LINEAR = "Linear"  # The class of plain linear layers.


@dataclass(frozen=True)
class Layer:
    """A module, or a weight as files have it that are not quantized.

    Attributes:
        tensor: the name of the weight there; of a module its name.
        module: the name of its module in the model, which files may not have.
        kinds: the names of the classes of the module.
        shape: of the weight; empty for a module.
    """

    tensor: str
    module: str
    kinds: frozenset[str]
    shape: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, str]:
        """The names of the module: in files, and in the model."""
        return self.tensor.removesuffix(WEIGHT), self.module

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a plain linear layer."""
        return LINEAR in self.kinds and len(self.shape) == 2
