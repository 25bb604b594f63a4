"""`zinf data analyze`."""

from pathlib import Path
from typing import Annotated

import typer

from zinf.cli.errors import clean_errors

data_app = typer.Typer(no_args_is_help=True, help="Data for training.")


@data_app.callback()
def data_commands() -> None:
    """Data for training."""


@data_app.command()
def analyze(
    paths: Annotated[
        list[str], typer.Argument(help="Files and folders, or stdlib; as data.paths.")
    ],
    metric: Annotated[
        list[str],
        typer.Option(
            help="sequence_length, vocabulary_rarity, or module:function from samples, "
            "int32 (samples, tokens), to an integer for each; repeatable."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "difficulty"
    ),
    sequence_length: Annotated[
        int, typer.Option(min=1, help="data.sequence_length of the run.")
    ] = 256,
    validation_fraction: Annotated[
        float, typer.Option(help="data.validation_fraction of the run.")
    ] = 0.05,
    glob: Annotated[str | None, typer.Option(help="data.glob of the run.")] = None,
    field: Annotated[str, typer.Option(help="data.field of the run.")] = "text",
    bin_dtype: Annotated[
        str, typer.Option(help="data.bin_dtype of the run.")
    ] = "uint16",
    processes: Annotated[int, typer.Option(min=1, help="Processes that compute.")] = 1,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error comes from.")
    ] = False,
) -> None:
    """Compute the difficulty of each training sample, for a curriculum.

    The folder gets NAME_index_to_sample and NAME_index_to_metric for each metric, in
    DeepSpeed's format, for the keys index_to_sample_path and index_to_metric_path. An
    analysis that was stopped continues where it was.
    """
    from zinf.data import Analysis
    from zinf.data import analyze as analyze_samples
    from zinf.data.text import read_tokens, split_windows

    with clean_errors(traceback):
        tokens = read_tokens(
            paths,
            glob=glob,
            field=field,
            bin_dtype=bin_dtype,
            cache=output / "data",
            say=print,
        )
        windows = split_windows(
            tokens,
            sequence_length=sequence_length,
            split="train",
            validation_fraction=validation_fraction,
        )
        told = windows.about(validation_fraction)
        analyze_samples(Analysis(windows, told, output, processes), metric, say=print)
        print(f"The index files are in {output}.")
