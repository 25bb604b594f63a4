"""Generates text with weights that stream from where they rest, and a cache."""

from zinf.inference.complete import ROWS as ROWS
from zinf.inference.complete import Asked as Asked
from zinf.inference.complete import complete as complete
from zinf.inference.decoder import Decoder as Decoder
from zinf.inference.drafts import Drafts as Drafts
from zinf.inference.drafts import prompt_lookup as prompt_lookup
from zinf.inference.forecast import Forecast as Forecast
from zinf.inference.forecast import Unfit as Unfit
from zinf.inference.forecast import forecasts as forecasts
from zinf.inference.forecast import saturating as saturating
from zinf.inference.forecast import weight_bytes as weight_bytes
from zinf.inference.pace import Pace as Pace
from zinf.inference.plan import GenerationPlanner as GenerationPlanner
from zinf.inference.prompts import bucket as bucket
from zinf.inference.prompts import check_length as check_length
from zinf.inference.sampling import Sampling as Sampling
from zinf.inference.sampling import read_settings as read_settings
from zinf.inference.sampling import token_ids as token_ids
from zinf.inference.scores import Scored as Scored
from zinf.inference.scores import Scores as Scores
from zinf.inference.scores import Written as Written
from zinf.inference.steps import Steps as Steps
