"""Config files: DeepSpeed's keys and zinf's own, strict, typed and explained."""

from zinf.config.batch import BatchSizes as BatchSizes
from zinf.config.batch import batch_sizes as batch_sizes
from zinf.config.check import Report as Report
from zinf.config.check import Row as Row
from zinf.config.check import report as report
from zinf.config.config import Config as Config
from zinf.config.grouping import Grouping as Grouping
from zinf.config.grouping import grouping as grouping
from zinf.config.messages import ConfigError as ConfigError
from zinf.config.notices import notices as notices
from zinf.config.precision import LossScaling as LossScaling
from zinf.config.schema import Data as Data
from zinf.config.schema import Memory as Memory
from zinf.config.schema import Model as Model
from zinf.config.schema import Run as Run
from zinf.config.schema import Segment as Segment
from zinf.config.size import parse_size as parse_size
from zinf.config.status import Status as Status
