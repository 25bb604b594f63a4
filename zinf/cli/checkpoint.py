"""`zinf checkpoint ls`, `verify`, `export`, `import` and `diff`."""

import time
from contextlib import ExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from zinf.cli.arguments import ShowTraceback
from zinf.cli.errors import clean_errors
from zinf.core.text.complaint import tell
from zinf.core.text.json_text import from_json

UNSOUND = 1

checkpoint_app = typer.Typer(
    no_args_is_help=True, help="List, check, compare and convert checkpoints."
)

Folder = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a folder of them (its newest is used); or a URL: s3://..."
    ),
]
Step = Annotated[int | None, typer.Option(help="Which checkpoint of the folder.")]
NamesFile = Annotated[
    Path | None,
    typer.Option(
        "--names", help="A JSON file: names of tensors by key path of the parameter."
    ),
]


class Format(StrEnum):
    """Formats of exported and imported parameters."""

    SAFETENSORS = "safetensors"
    ORBAX = "orbax"


@checkpoint_app.command()
def ls(
    folder: Folder,
    step: Step = None,
    arrays: Annotated[
        bool, typer.Option("--arrays", help="The arrays of one checkpoint.")
    ] = False,
    traceback: ShowTraceback = False,
) -> None:
    """List the checkpoints of a folder, or the arrays of one.

    Bytes that several checkpoints share by hard links count for the first of them.
    """
    from zinf.checkpoint import Saved
    from zinf.cli.report import print_arrays, print_checkpoints
    from zinf.core.interchange import entries, find

    with clean_errors(traceback):
        if arrays or step is not None:
            with Saved(find(folder, step)) as saved:
                print_arrays(saved)
        else:
            print_checkpoints(entries(folder))


@checkpoint_app.command()
def verify(folder: Folder, step: Step = None, traceback: ShowTraceback = False) -> None:
    """Read a whole checkpoint, and name each array, chunk and file that is damaged.

    The exit code is 1 if there is any damage, and 2 if the checkpoint cannot be read.
    """
    from zinf.checkpoint import Saved
    from zinf.core.interchange import find

    with clean_errors(traceback):
        start, count = time.perf_counter(), 0
        with Saved(find(folder, step)) as saved:
            for damage in saved.verify():
                count += 1
                chunk = "metadata" if damage.index is None else f"chunk {damage.index}"
                tell(f"{damage.array}, {chunk}, {damage.file}: {damage.found}")
            nbytes = sum(spec.nbytes for spec in saved.arrays.values())
            seconds = time.perf_counter() - start
            rate = nbytes / seconds / 1e9
            what = f"{len(saved.arrays)} arrays, {nbytes:,} bytes, {rate:.2f} GB/s"
            directory = saved.directory
    if count:
        tell(f"{directory}: {count} files are damaged ({what}).")
        raise typer.Exit(UNSOUND)
    tell(f"{directory}: all as it was saved ({what}).")


@checkpoint_app.command()
def diff(
    first: Folder,
    second: Folder,
    step: Annotated[
        tuple[int, int] | None, typer.Option(help="Which checkpoints of the folders.")
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Compare two checkpoints bit for bit: arrays that differ, by how much, and where.

    The exit code is 1 if they differ.
    """
    from zinf.checkpoint import Saved
    from zinf.cli.report import print_differences
    from zinf.core.interchange import differences, find, scalar_differences

    with clean_errors(traceback):
        steps = step or (None, None)
        with (
            Saved(find(first, steps[0])) as here,
            Saved(find(second, steps[1])) as there,
        ):
            scalars = list(scalar_differences(here, there))
            found = list(differences(here, there))
            same = sum(array in there.arrays for array in here.arrays) - sum(
                difference.found is None for difference in found
            )
            print_differences(found, scalars, same)
    if found or scalars:
        raise typer.Exit(UNSOUND)


@checkpoint_app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Argument(help="A folder that is not there yet.")],
    step: Step = None,
    to: Annotated[Format, typer.Option(help="The format.")] = Format.SAFETENSORS,
    weights: Annotated[
        str,
        typer.Option(help="master, as trained; or ema, the average (optimizer.ema)."),
    ] = "master",
    dtype: Annotated[
        str | None,
        typer.Option(help="Round all floats to this dtype; else they stay as kept."),
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(help="Bytes of tensors in a file of safetensors.")
    ] = 5 * 10**9,
    names: NamesFile = None,
    merge: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="Add adapters to the base: the config of the run."
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Write adapters alone, as PEFT does: the run's config.",
        ),
    ] = None,
    traceback: ShowTraceback = False,
) -> None:
    """Write the parameters of a checkpoint as safetensors files or for Orbax.

    If a parameter has a master copy, that is written. The model's code is not needed.
    """
    from zinf.checkpoint import Saved
    from zinf.cli.task import task_with_adapters
    from zinf.core.config import Config
    from zinf.core.interchange import export_orbax, export_safetensors, find
    from zinf.core.interchange.sources import parameters

    with clean_errors(traceback), Saved(find(folder, step)) as saved:
        if None not in (merge, adapter):
            raise ValueError("--merge and --adapter exclude each other; give one.")
        written: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_shard_bytes}
        tensors = parameters(saved, weights)
        if adapter is not None:
            task_with_adapters(Config.load(adapter)).write_adapter(tensors, output)
        elif to == Format.SAFETENSORS and merge is not None:
            task = task_with_adapters(Config.load(merge))
            task.write_merged(tensors, output, _names(names), **written)
        elif to == Format.SAFETENSORS:
            export_safetensors(tensors, output, names=_names(names), **written)
        elif names is not None:
            raise ValueError("--names is for safetensors: Orbax stores a tree.")
        elif merge is not None:
            raise ValueError("--merge is for safetensors; leave --to out.")
        else:
            export_orbax(saved, output, kind=weights, dtype=dtype)
        tell(f"The parameters of {saved.directory} are in {output}.")


@checkpoint_app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A safetensors file, or a folder of either format.")
    ],
    config: Annotated[
        Path, typer.Argument(help="The config of the run, YAML or JSON.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Set a key; repeatable."),
    ] = None,
    names: NamesFile = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Parameters that keep their value if absent; a pattern."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Tensors to leave out; a pattern.")
    ] = None,
    may_round: Annotated[
        bool, typer.Option("--may-round", help="Allow dtypes that hold less.")
    ] = False,
    traceback: ShowTraceback = False,
) -> None:
    """Make a checkpoint of step 0 from parameters, from which a run can start.

    If the config has an adapter section, they are those of the base.
    """
    from zinf.adapt.files import LORA_PATTERNS
    from zinf.adapt.merged import names_of_base
    from zinf.checkpoint import Checkpoints
    from zinf.cli.places import has_any, place_of_checkpoints
    from zinf.cli.run_folder import held_run
    from zinf.cli.task import task_of
    from zinf.cli.train import resume_command
    from zinf.core.engine.initialize import initialize
    from zinf.core.interchange import import_orbax, import_safetensors
    from zinf.core.interchange.orbax_import import METADATA
    from zinf.core.machine.devices import on_devices
    from zinf.distributed import Alone

    with clean_errors(traceback), ExitStack() as held:
        loaded, mesh = on_devices(config, overrides=overrides or ())
        held.enter_context(held_run(loaded, Alone()))
        folder = place_of_checkpoints(loaded)
        if has_any(folder):
            raise FileExistsError(
                f"{folder} has checkpoints already. Name another run.output, or "
                "another run.checkpoints."
            )
        task = task_of(loaded)
        arguments, named = task.arguments()
        name_of, kept = _names(names), list(keep or ())
        if loaded.adapter is not None:
            name_of = names_of_base(loaded.adapter, name_of)
            kept += LORA_PATTERNS
        terms = {
            "names": name_of,
            "keep": kept,
            "ignore": ignore or (),
            "may_round": may_round,
        }
        with closing(initialize(*arguments, **named, mesh=mesh)) as engine:
            if (source / METADATA).exists():
                import_orbax(engine, source, **terms)
            else:
                import_safetensors(engine, source, **terms)
            batches = iter(task.dataset("train")).get_state()
            with Checkpoints(folder, keep=loaded.run.keep_checkpoints) as checkpoints:
                # The same keys that `Trainer` saves.
                state = {"batches": batches, "num_skipped": 0}
                checkpoints.save(0, engine, state)
                checkpoints.wait()
        tell(f"{folder / '0'} has the parameters of {source}.")
        tell(f"Train with: {resume_command(config, overrides or ())}")


def _names(file: Path | None) -> dict[str, str] | None:
    if file is None:
        return None
    try:
        found = from_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Correct it.") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) for name in found.values()
    ):
        raise ValueError(f"{file} has to be a JSON object of texts: key path to name.")
    return found
