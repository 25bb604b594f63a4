"""Config files: DeepSpeed's keys and zinf's own, strict, typed and explained."""

from zinf.core.config.batch import BatchSizes as BatchSizes
from zinf.core.config.batch import batch_sizes as batch_sizes
from zinf.core.config.check import Report as Report
from zinf.core.config.check import Row as Row
from zinf.core.config.check import report as report
from zinf.core.config.config import Config as Config
from zinf.core.config.grouping import Grouping as Grouping
from zinf.core.config.grouping import grouping as grouping
from zinf.core.config.messages import ConfigError as ConfigError
from zinf.core.config.notices import notices as notices
from zinf.core.config.precision import LossScaling as LossScaling
from zinf.core.config.schema import Data as Data
from zinf.core.config.schema import Memory as Memory
from zinf.core.config.schema import Model as Model
from zinf.core.config.schema import Run as Run
from zinf.core.config.schema import Segment as Segment
from zinf.core.config.size import parse_size as parse_size
from zinf.core.config.status import Status as Status
