"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ModelName = Annotated[
    str,
    typer.Argument(
        help="A folder with config.json, safetensors and tokenizer, or with an "
        "adapter, or a name on the Hugging Face hub."
    ),
]
WholeModel = Annotated[
    str,
    typer.Argument(
        help="A folder with config.json, safetensors and tokenizer, or a name on "
        "the Hugging Face hub."
    ),
]
Base = Annotated[
    str | None,
    typer.Option(help="The model that an adapter is for; else the one it names."),
]
Nvme = Annotated[
    Path | None,
    typer.Option(help="Folder on a drive, for weights that memory has no room for."),
]
WeightBits = Annotated[
    int | None,
    typer.Option(
        metavar="8|4", help="Keep weights of linear layers in 8 or 4 bits each."
    ),
]
AllowChanged = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Go on although this setting is another than before; repeatable.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Set a key of a config, such as memory.host=8GiB; repeatable.",
    ),
]
TooLong = Literal["error", "truncate", "drop"]
ShowTraceback = Annotated[
    bool, typer.Option("--traceback", help="Show where an error comes from.")
]
CalibrationLength = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of a row, which texts fill one after the other. If absent, "
        "2048, or what the model was made for.",
    ),
]
ModelFolder = Annotated[
    Path,
    typer.Option(help="Folder for the model; it appears only when it is complete."),
]
ConfigFile = Annotated[Path, typer.Argument(help="A YAML or JSON file.")]
IgnoreUnsupported = Annotated[
    bool,
    typer.Option(
        "--ignore-unsupported",
        help="Leave out keys that are not supported, with a line each.",
    ),
]


def settings(overrides: list[str] | None, ignore_unsupported: bool) -> list[str]:
    """Keys with values, as of `--set`."""
    return [*(overrides or ()), *["ignore_unsupported=true"] * ignore_unsupported]
