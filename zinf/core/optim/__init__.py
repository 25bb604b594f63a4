"""Updates parameters leaf by leaf, wherever their optimizer state lives."""

from zinf.core.optim.average import with_ema as with_ema
from zinf.core.optim.clipping import Clipping as Clipping
from zinf.core.optim.host.host_update import AbstractHostUpdate as AbstractHostUpdate
from zinf.core.optim.host.on_host import host_updates as host_updates
from zinf.core.optim.loss_scale import LossScale as LossScale
from zinf.core.optim.loss_scale import LossScaleSettings as LossScaleSettings
from zinf.core.optim.separate import LeafUpdate as LeafUpdate
from zinf.core.optim.separate import Separated as Separated
from zinf.core.optim.separate import SharedState as SharedState
from zinf.core.optim.separate import State as State
from zinf.core.optim.separate import separate as separate
from zinf.core.optim.transforms.compressed import compressed as compressed
from zinf.core.optim.transforms.factory import build_optimizer as build_optimizer
from zinf.core.optim.transforms.factory import build_schedule as build_schedule
from zinf.core.optim.transforms.group_lasso import Member as Member
from zinf.core.optim.transforms.group_lasso import group_lasso as group_lasso
from zinf.core.optim.transforms.group_lasso import vanished as vanished
from zinf.core.optim.transforms.group_lasso import without as without
from zinf.core.optim.update import Unit as Unit
from zinf.core.optim.update import Updates as Updates
from zinf.core.optim.update import UpdateStep as UpdateStep
from zinf.core.optim.update import compile_advance as compile_advance
from zinf.core.optim.update import compile_updates as compile_updates
from zinf.core.optim.update import update_function as update_function
