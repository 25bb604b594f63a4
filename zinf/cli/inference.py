"""Declares `zinf generate`, `evaluate`, `score` and `embed`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zinf.cli.arguments import (
    AllowChanged,
    Base,
    ModelName,
    Nvme,
    Overrides,
    ShowTraceback,
    TooLong,
    WeightBits,
)
from zinf.cli.errors import clean_errors
from zinf.distributed.options import Place, with_place

MaxLength = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Most tokens of a line; if absent, what the model was made for.",
    ),
]


@with_place
def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option(help="The text to complete.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An image that the user shows before --prompt; repeatable."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines of prompt or messages, in place of --prompt."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the lines of --prompts, each with its completion. Lines "
            "that it has are not made again. FILE.settings.json says how they are made."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="A prompt is what a user says to the assistant, or the beginning of a "
            "text. If absent, the former for models with a chat template.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a completion.")
    ] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token each time.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest with this probability."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the likeliest's probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: what was said becomes less likely.")
    ] = None,
    prompt_lookup_num_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Guess so many next tokens from what followed the last ones earlier "
            "in the text, and check all at once: streamed weights are read less often. "
            "The text stays as it is.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A small model with the same vocabulary, which guesses next tokens: "
            "the large one checks all at once and is read less often. The text stays "
            "as it is. The small model takes at most a quarter of the budgets.",
        ),
    ] = None,
    draft_num_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that --draft guesses each time.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Of the tokens that are drawn.")] = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Lines of --prompts that are made together.")
    ] = 64,
    base: Base = None,
    nvme: Nvme = None,
    weight_bits: WeightBits = None,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
    *,
    place: Place,
) -> None:
    """Complete a prompt, or each line of a file, with a model that need not fit.

    The completion alone is written to the standard output, as it is made. What is not
    set here is as the model's generation_config.json says. Of several processes, which
    all read the same prompts, the first writes.
    """
    from zinf.cli.generate import (
        Drafting,
        budgets,
        print_completion,
        write_completions,
    )
    from zinf.cli.group import joined

    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("Give one of --prompt and --prompts.")
    if (prompts is None) != (output is None):
        raise typer.BadParameter("--prompts needs --output, and --prompt has none.")
    if image and prompt is None:
        raise typer.BadParameter("--image is shown before --prompt; give one.")
    if draft is not None and prompt_lookup_num_tokens:
        raise typer.BadParameter(
            "Give one of --draft and --prompt-lookup-num-tokens: guesses come from one "
            "source."
        )
    drafting = None if draft is None else Drafting(draft, draft_num_tokens)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
    }
    with joined(place, traceback) as group:
        how = given, budgets(overrides or (), nvme, weight_bits)
        rest: dict[str, Any] = {"base": base, "max_new_tokens": max_new_tokens}
        rest |= {"seed": seed, "chat": chat, "drafting": drafting, "group": group}
        if prompt is not None:
            rest["images"] = image or ()
            print_completion(model, {"prompt": prompt}, *how, **rest)
        elif prompts is not None and output is not None:
            rest |= {"batch_size": batch_size, "allow_changed": allow_changed or ()}
            write_completions(model, prompts, output, *how, **rest)


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CONFIG",
            help="As for zinf generate; or the config file of a run of zinf train, of "
            "which the newest checkpoint is evaluated.",
        ),
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines, a JSON array or parquet, with lines as zinf finetune "
            "takes; repeatable. A config names its data itself."
        ),
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Most tokens of a sample.")
    ] = 1024,
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="Longer samples: error ends the command, truncate cuts them, drop "
            "leaves them out."
        ),
    ] = "error",
    whole: Annotated[
        bool, typer.Option("--whole", help="Count the tokens of prompts too.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint of a config's run.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="In place of run.evaluate_batches of a config."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="In place of run.weights of a config: master, as trained, or ema, "
            "their average."
        ),
    ] = None,
    base: Base = None,
    nvme: Nvme = None,
    weight_bits: WeightBits = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
) -> None:
    """Print the loss and the perplexity of a model on held-out lines.

    Of a reward model, and lines with chosen and rejected answers: the share of pairs
    whose chosen answer has the higher score, and the mean margin.
    For a config, the batches are those of the evaluations of zinf train.
    """
    of_run = _is_config(model)
    if of_run and (data or (base, nvme, weight_bits) != (None, None, None)):
        raise typer.BadParameter(
            "A config names its data and folders itself: use --set, not --data, "
            "--base, --nvme or --weight-bits."
        )
    if not of_run and (step, batches, weights) != (None, None, None):
        raise typer.BadParameter(
            "--step, --batches and --weights are for the config of a run."
        )
    if not of_run and not data:
        raise typer.BadParameter("Name the files to evaluate on: --data FILE.")
    if of_run:
        from zinf.cli.evaluate import print_run_evaluation

        with clean_errors(traceback):
            print_run_evaluation(
                Path(model),
                overrides or (),
                step=step,
                num_batches=batches,
                weights=weights,
            )
        return
    from zinf.cli.generate import budgets, print_evaluation

    with clean_errors(traceback):
        print_evaluation(
            model,
            data or (),
            budgets(overrides or (), nvme, weight_bits),
            base=base,
            sequence_length=sequence_length,
            too_long=too_long,
            completion_only=not whole,
        )


def score(
    model: ModelName,
    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines, a JSON array or parquet. Of a language model: text; "
            "prompt and completion; messages, of which the last is scored; or prompt "
            "and choices, a list of texts. Of a classifier: text, maybe text_pair, or "
            "messages."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="File for the lines of --data, each with its scores. Lines that it "
            "has are not made again. FILE.settings.json says how they are made."
        ),
    ],
    choices: Annotated[
        str | None,
        typer.Option(
            help="What may follow each prompt, as texts with commas between them, such "
            "as yes,no or ' yes, no': the output has their probabilities and the best."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="A prompt is what a user says to the assistant."),
    ] = False,
    max_length: MaxLength = None,
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="Longer lines: error ends the command, truncate cuts them (at their "
            "beginning; for a classifier at their end), drop gives them no score."
        ),
    ] = "error",
    base: Base = None,
    nvme: Nvme = None,
    weight_bits: WeightBits = None,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
) -> None:
    """Score each line of a file with a model that need not fit.

    A language model gives log_likelihood (in nats) and num_tokens, how many are scored:
    all of a text but its first token, or all of a completion, to which nothing is
    added. With choices it gives log_likelihoods, probabilities that add up to 1, and
    best. A classifier gives probabilities by class and best, or score if it has one
    output.
    """
    from zinf.cli.generate import budgets
    from zinf.cli.score import write_scores

    with clean_errors(traceback):
        write_scores(
            model,
            data,
            output,
            budgets(overrides or (), nvme, weight_bits),
            choices=() if choices is None else choices.split(","),
            chat=chat,
            max_length=max_length,
            too_long=too_long,
            base=base,
            allow_changed=allow_changed or (),
        )


def embed(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of a model or of sentence-transformers, or a name on the "
            "Hugging Face hub."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="JSON lines, a JSON array or parquet, with a text.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="FILE.npy for the vectors alone, float32 (lines, dims), or FILE.jsonl "
            "for the lines of --data with an embedding. Lines that it has are not made "
            "again. FILE.settings.json says how they are made."
        ),
    ],
    column: Annotated[
        str, typer.Option(help="Of the lines, which has the text.")
    ] = "text",
    pooling: Annotated[
        Literal["mean", "last", "cls"] | None,
        typer.Option(
            help="Of the states of all tokens, the last or the first one. If absent, "
            "as the folder of sentence-transformers says, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Whether vectors have the length 1. If absent, as the folder of "
            "sentence-transformers says, else they have.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What stands before each text.")
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="A prompt of the folder, such as query or document."),
    ] = None,
    max_length: MaxLength = None,
    too_long: Annotated[
        TooLong,
        typer.Option(
            help="Longer lines: truncate cuts them at their end, as "
            "sentence-transformers does, error ends the command, drop gives them no "
            "vector (.jsonl only)."
        ),
    ] = "truncate",
    nvme: Nvme = None,
    weight_bits: WeightBits = None,
    allow_changed: AllowChanged = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
) -> None:
    """Make a vector of each line of a file with a model that need not fit.

    A folder of sentence-transformers loads with its pooling, layers, normalization,
    length and prompts; sentence-transformers need not be installed.
    """
    from zinf.cli.generate import budgets
    from zinf.cli.score import write_vectors

    with clean_errors(traceback):
        write_vectors(
            model,
            data,
            output,
            budgets(overrides or (), nvme, weight_bits),
            column=column,
            pooling=pooling,
            normalize=normalize,
            prompt=prompt,
            prompt_name=prompt_name,
            max_length=max_length,
            too_long=too_long,
            allow_changed=allow_changed or (),
        )


def _is_config(name: str) -> bool:
    """Whether an argument names a config of zinf, and no model of transformers."""
    path = Path(name)
    is_json = path.suffix == ".json" and path.name != "config.json"
    return path.suffix in (".yaml", ".yml") or is_json and path.is_file()
