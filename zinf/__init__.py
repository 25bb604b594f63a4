"""Train any JAX model, of any size, on the hardware you have."""

from typing import TYPE_CHECKING

# It keeps what the environment is now.
from zinf import started as started
from zinf.lazy import make_lazy

if TYPE_CHECKING:
    from zinf import adapt as adapt
    from zinf import checkpoint as checkpoint
    from zinf import config as config
    from zinf import data as data
    from zinf import distributed as distributed
    from zinf import hf as hf
    from zinf import inference as inference
    from zinf import linen as linen
    from zinf import mesh as mesh
    from zinf import models as models
    from zinf import moe as moe
    from zinf import nnx as nnx
    from zinf import observe as observe
    from zinf import tiling as tiling
    from zinf import topology as topology
    from zinf.config import Config as Config
    from zinf.engine import Engine as Engine
    from zinf.engine import close_all as close_all
    from zinf.initialize import initialize as initialize
    from zinf.initialize import plan_only as plan_only
    from zinf.malloc import tune_malloc as tune_malloc
    from zinf.mesh import make_mesh as make_mesh
    from zinf.models.random_ltd import random_ltd as random_ltd
    from zinf.models.random_ltd import sample_kept as sample_kept
    from zinf.segment.weighted import Weighted as Weighted
    from zinf.trainer import Trainer as Trainer
    from zinf.verify import verify as verify

__version__ = "0.1.0"

make_lazy(
    __name__,
    {
        "Config": "zinf.config",
        "Engine": "zinf.engine",
        "Trainer": "zinf.trainer",
        "Weighted": "zinf.segment.weighted",
        "close_all": "zinf.engine",
        "initialize": "zinf.initialize",
        "make_mesh": "zinf.mesh",
        "plan_only": "zinf.initialize",
        "random_ltd": "zinf.models.random_ltd",
        "sample_kept": "zinf.models.random_ltd",
        "tune_malloc": "zinf.malloc",
        "verify": "zinf.verify",
    },
    modules=(
        "adapt",
        "checkpoint",
        "config",
        "data",
        "distributed",
        "hf",
        "inference",
        "linen",
        "mesh",
        "models",
        "moe",
        "nnx",
        "observe",
        "tiling",
        "topology",
    ),
)
