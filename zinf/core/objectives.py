"""The objectives of fine-tuning: what configs and commands know of each before torch.

A row here and a module of its name in `zinf.hf.objectives` are an objective.
"""

from dataclasses import dataclass

# Keys of the data section that not all runs read, by who reads them. What the run of a
# config does not read is refused if it is set.
# Of models that are not of transformers, which read text.
OF_OWN_MODELS = frozenset(
    {"bin_dtype", "cache", "field", "glob", "max_buckets", "validation_fraction"}
)
# Of samples in files for models of transformers, and of those of conversations.
_SAMPLES = frozenset(
    {"cache", "evaluation_paths", "too_long", "truncate", "validation_fraction"}
)
_ANSWERS = _SAMPLES | {"assistant_only"}


@dataclass(frozen=True)
class Traits:
    """Properties of an objective that config checks and command options read.

    Attributes:
        goal: what the model learns, in words that follow its name.
        lines: what a line of data has, for help; "" for all that others do not need.
        num_sequences: sequences of tokens that a sample has.
        rate: the default learning rate, as a multiple of that of sft.
        reads: keys of the data section that it reads, of those that others do not.
        predicts_next: the loss has a term for each token of a row, the entropy of the
            next one. Such rows can be packed, shortened and batched by their tokens.
        is_drawn: the model writes what it is trained on; lines have prompts alone.
    """

    goal: str
    lines: str = ""
    num_sequences: int = 1
    rate: float = 1.0
    reads: frozenset[str] = _SAMPLES
    predicts_next: bool = False
    is_drawn: bool = False

    @property
    def takes_images(self) -> bool:
        """Whether lines may have images."""
        return "images" in self.reads


OBJECTIVES = {
    "sft": Traits(
        "predict the next token",
        reads=_ANSWERS | {"completion_only", "images", "max_buckets", "packing"},
        predicts_next=True,
    ),
    "dpo": Traits(
        "prefer chosen answers to rejected ones, https://arxiv.org/abs/2305.18290",
        "chosen and rejected answers",
        num_sequences=2,
        # Such as 1e-6 of all weights: appendix B of the paper.
        rate=0.1,
        reads=_ANSWERS | {"beta", "images"},
    ),
    "ipo": Traits(
        "prefer them by a set difference, https://arxiv.org/abs/2310.12036",
        "chosen and rejected answers",
        num_sequences=2,
        # As dpo, of which it is a loss in TRL.
        rate=0.1,
        reads=_ANSWERS | {"beta", "images"},
    ),
    "simpo": Traits(
        "prefer them by their mean over tokens, https://arxiv.org/abs/2405.14734",
        "chosen and rejected answers",
        num_sequences=2,
        # From 3e-7 to 1e-6 of all weights: appendix B of the paper.
        rate=0.1,
        reads=_ANSWERS | {"beta", "images", "simpo_gamma"},
    ),
    "orpo": Traits(
        "predict chosen answers and prefer them, https://arxiv.org/abs/2403.07691",
        "chosen and rejected answers",
        num_sequences=2,
        # The learning rate of sft; TRL's example trains all weights at 8e-6.
        reads=_ANSWERS | {"beta", "images"},
    ),
    "kto": Traits(
        "tell desirable answers from others, https://arxiv.org/abs/2402.01306",
        "a prompt, its completion and a label, true or false",
        # That behind its prompt, and another one.
        num_sequences=2,
        # As in TRL, 1e-6 of all weights.
        rate=0.1,
        reads=_ANSWERS | {"beta", "desirable_weight", "images", "undesirable_weight"},
    ),
    "reward": Traits(
        "score chosen answers above rejected ones, https://arxiv.org/abs/2203.02155",
        "chosen and rejected answers",
        num_sequences=2,
        reads=_SAMPLES | {"center_rewards_coefficient", "images"},
    ),
    "classification": Traits(
        "give a text its label", "a text and its label", reads=_SAMPLES | {"labels"}
    ),
    "grpo": Traits(
        "write what is rewarded, https://arxiv.org/abs/2402.03300",
        "prompts",
        # 1e-6 of all weights, as in TRL.
        rate=0.1,
        is_drawn=True,
        reads=frozenset({"images", "too_long"}),
    ),
    "ppo": Traits(
        "write what is rewarded, by a critic, https://arxiv.org/abs/1707.06347",
        "prompts",
        # 3e-6 of all weights, as in TRL's example.
        rate=0.3,
        is_drawn=True,
        reads=frozenset({"too_long"}),
    ),
}
KEYS_OF_SOME = OF_OWN_MODELS.union(*(traits.reads for traits in OBJECTIVES.values()))
# Objectives of `zinf finetune`; others have commands of their own.
FINETUNED = {name: traits for name, traits in OBJECTIVES.items() if not traits.is_drawn}


def in_help() -> str:
    """The objectives of `zinf finetune` in a sentence for `--help`."""
    by_lines: dict[str, list[str]] = {}
    for name, traits in FINETUNED.items():
        by_lines.setdefault(traits.lines, []).append(name)
    return "; ".join(
        ", ".join(names) + (f" for lines with {lines}" if lines else "")
        for lines, names in by_lines.items()
    )
