"""Updates parameters leaf by leaf, wherever their optimizer state lives."""

from zinf.optim.clipping import Clipping as Clipping
from zinf.optim.factory import build_optimizer as build_optimizer
from zinf.optim.factory import build_schedule as build_schedule
from zinf.optim.host_update import AbstractHostUpdate as AbstractHostUpdate
from zinf.optim.loss_scale import LossScale as LossScale
from zinf.optim.loss_scale import LossScaleSettings as LossScaleSettings
from zinf.optim.on_host import host_updates as host_updates
from zinf.optim.separate import LeafUpdate as LeafUpdate
from zinf.optim.separate import Separated as Separated
from zinf.optim.separate import SharedState as SharedState
from zinf.optim.separate import State as State
from zinf.optim.separate import separate as separate
from zinf.optim.update import Unit as Unit
from zinf.optim.update import Updates as Updates
from zinf.optim.update import UpdateStep as UpdateStep
from zinf.optim.update import compile_advance as compile_advance
from zinf.optim.update import compile_updates as compile_updates
from zinf.optim.update import update_function as update_function
