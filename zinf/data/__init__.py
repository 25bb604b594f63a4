"""Reads training data from files of text and of tokens."""

from zinf.core.config.pace import Pace as Pace
from zinf.core.config.pacing import Pacing as Pacing
from zinf.data.analyze import Analysis as Analysis
from zinf.data.analyze import analyze as analyze
from zinf.data.curriculum import CurriculumSamples as CurriculumSamples
from zinf.data.curriculum import DifficultyIndex as DifficultyIndex
from zinf.data.curriculum import Metric as Metric
from zinf.data.files import Found as Found
from zinf.data.files import Kind as Kind
from zinf.data.files import find_files as find_files
from zinf.data.foreseen import AbstractForeseen as AbstractForeseen
from zinf.data.paced import Dropping as Dropping
from zinf.data.paced import Paced as Paced
from zinf.data.paced import PacedIterator as PacedIterator
from zinf.data.paced import describe as describe
from zinf.data.share import Share as Share
from zinf.data.taught import TEACHER_LOGITS as TEACHER_LOGITS
from zinf.data.taught import Taught as Taught
from zinf.data.taught import TaughtIterator as TaughtIterator
from zinf.data.text import read_tokens as read_tokens
from zinf.data.text import text_dataset as text_dataset
from zinf.data.token_batches import Bucket as Bucket
from zinf.data.token_batches import TokenBatches as TokenBatches
from zinf.data.token_batches import make_buckets as make_buckets
from zinf.data.token_batches import rate_scale as rate_scale
from zinf.data.tokens import Tokens as Tokens
