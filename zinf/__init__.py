"""Train any JAX model, of any size, on the hardware you have."""

from zinf import linen as linen
from zinf import nnx as nnx
from zinf.config import Config as Config
from zinf.engine import Engine as Engine
from zinf.initialize import initialize as initialize
from zinf.initialize import plan_only as plan_only
from zinf.mesh import make_mesh as make_mesh
from zinf.trainer import Trainer as Trainer

__version__ = "0.1.0"
