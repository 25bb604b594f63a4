"""Train any JAX model, of any size, on the hardware you have."""

from typing import TYPE_CHECKING

# It keeps what the environment is now.
from zinf.core.process import started as started
from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf import adapt as adapt
    from zinf import checkpoint as checkpoint
    from zinf import data as data
    from zinf import distributed as distributed
    from zinf import hf as hf
    from zinf import inference as inference
    from zinf import linen as linen
    from zinf import models as models
    from zinf import moe as moe
    from zinf import nnx as nnx
    from zinf import observe as observe
    from zinf import tiling as tiling
    from zinf.core import config as config
    from zinf.core import interchange as interchange
    from zinf.core import memory as memory
    from zinf.core import optim as optim
    from zinf.core import plan as plan
    from zinf.core import rl as rl
    from zinf.core import rollouts as rollouts
    from zinf.core import topology as topology
    from zinf.core.config import Config as Config
    from zinf.core.engine.engine import Engine as Engine
    from zinf.core.engine.engine import close_all as close_all
    from zinf.core.engine.initialize import initialize as initialize
    from zinf.core.engine.initialize import plan_only as plan_only
    from zinf.core.optim.average import with_ema as with_ema
    from zinf.core.optim.transforms.compressed import compressed as compressed
    from zinf.core.problem.weighted import Weighted as Weighted
    from zinf.core.process.malloc import tune_malloc as tune_malloc
    from zinf.core.sharding import mesh as mesh
    from zinf.core.sharding.mesh import make_mesh as make_mesh
    from zinf.core.trainer import Hook as Hook
    from zinf.core.trainer import Trainer as Trainer
    from zinf.core.verification.verify import verify as verify
    from zinf.models.random_ltd import random_ltd as random_ltd
    from zinf.models.random_ltd import sample_kept as sample_kept

__version__ = "0.1.0"

make_lazy(__name__)
