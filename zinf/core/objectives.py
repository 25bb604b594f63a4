"""The objectives of fine-tuning: what configs and commands know of each before torch.

A row here and a module of its name in `zinf.hf.objectives` are an objective.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """Properties of an objective that config checks and command options read.

    Attributes:
        goal: what the model learns, in words that follow its name.
        lines: what a line of data has, for help; "" for all that others do not need.
        num_sequences: sequences of tokens that a sample has.
        rate: the default learning rate, as a multiple of that of sft.
        predicts_next: the loss has a term for each token of a row, the entropy of the
            next one. Such rows can be packed, shortened and batched by their tokens.
        has_classes: whether `data.labels` names its classes.
        is_drawn: the model writes what it is trained on; lines have prompts alone.
        takes_images: lines may have images.
    """

    goal: str
    lines: str = ""
    num_sequences: int = 1
    rate: float = 1.0
    predicts_next: bool = False
    has_classes: bool = False
    is_drawn: bool = False
    takes_images: bool = False


OBJECTIVES = {
    "sft": Traits("predict the next token", predicts_next=True, takes_images=True),
    "dpo": Traits(
        "prefer chosen answers to rejected ones, https://arxiv.org/abs/2305.18290",
        "chosen and rejected answers",
        num_sequences=2,
        # Such as 1e-6 of all weights: appendix B of the paper.
        rate=0.1,
        takes_images=True,
    ),
    "ipo": Traits(
        "prefer them by a set difference, https://arxiv.org/abs/2310.12036",
        "chosen and rejected answers",
        num_sequences=2,
        # As dpo, of which it is a loss in TRL.
        rate=0.1,
        takes_images=True,
    ),
    "simpo": Traits(
        "prefer them by their mean over tokens, https://arxiv.org/abs/2405.14734",
        "chosen and rejected answers",
        num_sequences=2,
        # From 3e-7 to 1e-6 of all weights: appendix B of the paper.
        rate=0.1,
        takes_images=True,
    ),
    "orpo": Traits(
        "predict chosen answers and prefer them, https://arxiv.org/abs/2403.07691",
        "chosen and rejected answers",
        num_sequences=2,
        # The learning rate of sft; TRL's example trains all weights at 8e-6.
        takes_images=True,
    ),
    "kto": Traits(
        "tell desirable answers from others, https://arxiv.org/abs/2402.01306",
        "a prompt, its completion and a label, true or false",
        # That behind its prompt, and another one.
        num_sequences=2,
        # As in TRL, 1e-6 of all weights.
        rate=0.1,
        takes_images=True,
    ),
    "reward": Traits(
        "score chosen answers above rejected ones, https://arxiv.org/abs/2203.02155",
        "chosen and rejected answers",
        num_sequences=2,
        takes_images=True,
    ),
    "classification": Traits(
        "give a text its label", "a text and its label", has_classes=True
    ),
    "grpo": Traits(
        "write what is rewarded, https://arxiv.org/abs/2402.03300",
        "prompts",
        # 1e-6 of all weights, as in TRL.
        rate=0.1,
        is_drawn=True,
        takes_images=True,
    ),
    "ppo": Traits(
        "write what is rewarded, by a critic, https://arxiv.org/abs/1707.06347",
        "prompts",
        # 3e-6 of all weights, as in TRL's example.
        rate=0.3,
        is_drawn=True,
    ),
}
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
