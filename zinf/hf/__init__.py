"""Trains models of Hugging Face's `transformers` as they are; needs the extra `hf`."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.hf.analysis import analysis_of as analysis_of
    from zinf.hf.batch import IGNORED as IGNORED
    from zinf.hf.calibration import calibration_rows as calibration_rows
    from zinf.hf.comparison import Verdict as Verdict
    from zinf.hf.comparison import verdict_of as verdict_of
    from zinf.hf.completion import complete_texts as complete_texts
    from zinf.hf.completion import lookup_of as lookup_of
    from zinf.hf.completion import prompt_tokens as prompt_tokens
    from zinf.hf.completion import settings_of as settings_of
    from zinf.hf.critic import Critic as Critic
    from zinf.hf.critic import load_critic as load_critic
    from zinf.hf.dataset import no_samples as no_samples
    from zinf.hf.dataset import treated as treated
    from zinf.hf.distilling import Distilling as Distilling
    from zinf.hf.drafting import drafting as drafting
    from zinf.hf.embedding import embed as embed
    from zinf.hf.embedding import open_embedder as open_embedder
    from zinf.hf.encoder import load_encoder as load_encoder
    from zinf.hf.engine import ModelEngine as ModelEngine
    from zinf.hf.engine import initialize as initialize
    from zinf.hf.engine import open_model as open_model
    from zinf.hf.engine import running as running
    from zinf.hf.export import export as export
    from zinf.hf.export import export_adapter as export_adapter
    from zinf.hf.export import write_adapter as write_adapter
    from zinf.hf.export import write_model as write_model
    from zinf.hf.foresight import Foresight as Foresight
    from zinf.hf.foresight import foresee as foresee
    from zinf.hf.grpo import GRPOConfig as GRPOConfig
    from zinf.hf.grpo import GRPOTrainer as GRPOTrainer
    from zinf.hf.heads import HeadModel as HeadModel
    from zinf.hf.heads import load_head as load_head
    from zinf.hf.images.completion import decoder_after as decoder_after
    from zinf.hf.images.completion import image_prompt as image_prompt
    from zinf.hf.images.model import ImageModel as ImageModel
    from zinf.hf.images.model import load_with_images as load_with_images
    from zinf.hf.merge import merge as merge
    from zinf.hf.model import Model as Model
    from zinf.hf.model import in_stored_precision as in_stored_precision
    from zinf.hf.model import load as load
    from zinf.hf.model import load_as_stored as load_as_stored
    from zinf.hf.objectives.dpo import Preference as Preference
    from zinf.hf.ppo import PPOConfig as PPOConfig
    from zinf.hf.ppo import PPOTrainer as PPOTrainer
    from zinf.hf.prune import check_pruning as check_pruning
    from zinf.hf.prune import most_used as most_used
    from zinf.hf.prune import prune_experts as prune_experts
    from zinf.hf.prune import prune_layers as prune_layers
    from zinf.hf.prune import use_of_experts as use_of_experts
    from zinf.hf.quantize import check_quantizing as check_quantizing
    from zinf.hf.quantize import quantize as quantize
    from zinf.hf.rating import is_reward_model as is_reward_model
    from zinf.hf.rating import rate as rate
    from zinf.hf.reader import AbstractReader as AbstractReader
    from zinf.hf.records import has_images as has_images
    from zinf.hf.records import records as records
    from zinf.hf.samples import Tokenizing as Tokenizing
    from zinf.hf.scoring import open_scorer as open_scorer
    from zinf.hf.scoring import score as score
    from zinf.hf.task import Task as Task

make_lazy(__name__, extra="hf", door="zinf.hf.versions")
