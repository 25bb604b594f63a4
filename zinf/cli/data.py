"""`zinf data analyze`."""

from pathlib import Path
from typing import Annotated

import typer

from zinf.cli.arguments import TooLong
from zinf.cli.errors import clean_errors
from zinf.core.text.complaint import tell

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
    model: Annotated[
        str | None,
        typer.Option(
            help="Analyze the samples on which this model of transformers is trained: "
            "model.huggingface of the run. Paths are files of JSON lines or parquet."
        ),
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing", help="data.packing of the run.")
    ] = False,
    too_long: Annotated[
        TooLong | None, typer.Option(help="data.too_long of the run.")
    ] = None,
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
    from zinf.cli.analysis import samples, windows
    from zinf.core.memory.lock_file import lock_of_folder, locked
    from zinf.data import analyze as analyze_samples

    if model is None and (packing or too_long):
        raise typer.BadParameter("--packing and --too-long are for --model.")
    common = {
        "sequence_length": sequence_length,
        "validation_fraction": validation_fraction,
        "processes": processes,
    }
    locks = {output: lock_of_folder(output)}
    with clean_errors(traceback), locked(locks, change="name another --output"):
        if model is None:
            files = {"glob": glob, "field": field, "bin_dtype": bin_dtype}
            found = windows(paths, output, **files, **common)
        else:
            rows = {"packing": packing, "too_long": too_long}
            found = samples(model, paths, output, **rows, **common)
        analyze_samples(found, metric, say=tell)
        tell(f"The index files are in {output}.")
