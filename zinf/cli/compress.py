"""Declares `zinf quantize`, `prune` and `merge`, which write models made of others."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from zinf.cli.arguments import (
    CalibrationLength,
    ModelFolder,
    Nvme,
    Overrides,
    ShowTraceback,
    WholeModel,
)
from zinf.cli.errors import clean_errors


def quantize(
    model: WholeModel,
    output: ModelFolder,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts that gptq, awq and lkd see: JSON lines, a JSON array or "
            "parquet, with lines as zinf finetune takes; repeatable."
        ),
    ] = None,
    bits: Annotated[
        int, typer.Option(metavar="4|8", help="Of each number of a linear layer.")
    ] = 4,
    method: Annotated[
        Literal["gptq", "awq", "lkd", "rtn"],
        typer.Option(
            help="gptq changes the outputs of a linear layer least for the texts of "
            "--data; awq scales large inputs, for which norms and layers before take "
            "the inverse; lkd trains each layer of the model so that its outputs "
            "change least; rtn rounds each number to the nearest and needs no texts."
        ),
    ] = "gptq",
    group_size: Annotated[
        int,
        typer.Option(min=1, help="Inputs of a layer that share a scale."),
    ] = 128,
    lkd_steps: Annotated[
        int | None,
        typer.Option(help="Steps of Adam that lkd trains, 400 if absent."),
    ] = None,
    lkd_learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Of lkd's first step, in codes, 0.005 if absent. It falls to 0."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Most rows of --data that are seen.")
    ] = 128,
    sequence_length: CalibrationLength = None,
    nvme: Nvme = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
) -> None:
    """Write a model with linear layers in 4 or 8 bits (compressed-tensors).

    zinf and transformers read the folder. Embeddings, output heads, routers and stacked
    experts stay as they are.
    """
    from zinf.cli.generate import budgets
    from zinf.cli.quantize import write_quantized

    with clean_errors(traceback):
        write_quantized(
            model,
            data or (),
            output,
            budgets(overrides or (), nvme, None),
            bits=bits,
            method=method,
            group_size=group_size,
            lkd_steps=lkd_steps,
            lkd_learning_rate=lkd_learning_rate,
            samples=samples,
            sequence_length=sequence_length,
        )


def prune(
    model: WholeModel,
    output: ModelFolder,
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many experts of each layer, the most used."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Keep these layers, such as 0,4,8.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts that use experts: JSON lines, a JSON array or parquet, with "
            "lines as zinf finetune takes; repeatable."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Most rows of --data that are read.")
    ] = 128,
    sequence_length: CalibrationLength = None,
    nvme: Nvme = None,
    overrides: Overrides = None,
    traceback: ShowTraceback = False,
) -> None:
    """Write a model with the most used of its experts, or with some of its layers.

    zinf and transformers read the folder, and zinf finetune trains it on.
    """
    from zinf.cli.generate import budgets
    from zinf.cli.prune import write_pruned

    with clean_errors(traceback):
        write_pruned(
            model,
            data or (),
            output,
            budgets(overrides or (), nvme, None),
            experts=experts,
            layers=layers,
            samples=samples,
            sequence_length=sequence_length,
        )


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders or names of models of one architecture. The first one gives "
            "what is no mean: configuration, tokenizer, buffers.",
        ),
    ],
    output: ModelFolder,
    shares: Annotated[
        str | None,
        typer.Option(
            help="Of each model in the means, such as 0.7,0.3; if absent, all alike."
        ),
    ] = None,
    only: Annotated[
        Literal["all", "experts"],
        typer.Option(help="Which weights are means; others are the first model's."),
    ] = "all",
    threshold: Annotated[
        float,
        typer.Option(
            help="A tensor (each expert is one) stays the first model's, unless its "
            "difference from another's is larger, in root mean square."
        ),
    ] = 0.0,
    traceback: ShowTraceback = False,
) -> None:
    """Write a model whose weights are means of those of several, tensor by tensor."""
    from zinf.cli.merge import write_merged

    with clean_errors(traceback):
        write_merged(models, output, shares=shares, only=only, threshold=threshold)
