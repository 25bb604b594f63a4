"""What is imported when: nobody waits for a library that their command does not use.

Only names of modules are asserted here. The figures are in zinf/cli/README.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What zinf may need in some run, and takes 20 to 500 ms of a processor to import.
HEAVY = {
    "IPython",
    "chex",
    "flax",
    "grain",
    "llvmlite",
    "nbclient",
    "numba",
    "orbax",
    "pandas",
    "plotly",
    "pyarrow",
    "rich",
    "tensorboardX",
    "torch",
    "torchax",
    "transformers",
    "typer",
    "zarr",
}
CHECK = ["config", "check", "configs/quickstart.yaml"]
ARRAYS = {"jax", "jaxlib", "ml_dtypes", "numpy", "optax", "pydantic", "tensorstore"}


def imported(code: str) -> set[str]:
    """Top-level packages that are imported after `code` ran in a new process."""
    last = (
        "print('\\n' + json.dumps([*{name.partition('.')[0] for name in sys.modules}]))"
    )
    program = f"import json, sys\n{code}\n{last}"
    asked = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    return set(json.loads(asked.stdout.splitlines()[-1]))


def test_initialize_imports_no_library_before_it_is_called():
    """Nor is any validator of a config built, which takes longer than importing optax.

    The function stays, too, whoever imports the module of its name.
    """
    code = (
        "import gc; before = gc.get_stats()[-1]['collections']\n"
        "import zinf; f = zinf.initialize; assert gc.isenabled()\n"
        "assert gc.get_stats()[-1]['collections'] == before, gc.get_stats()\n"
        "def below(cls):\n"
        "    for sub in cls.__subclasses__():\n"
        "        yield sub\n"
        "        yield from below(sub)\n"
        "from pydantic import BaseModel\n"
        "built = [c for c in below(BaseModel) if 'zinf' in c.__module__\n"
        "         and c.__pydantic_complete__]\n"
        "assert zinf.Config in below(BaseModel) and built == [], built\n"
        "import zinf.core.engine.initialize\n"
        "assert zinf.initialize is f and f.__name__ == 'initialize'\n"
    )
    found = imported(code)
    assert "jax" in found
    assert found & HEAVY == set()


def test_a_function_is_not_replaced_by_the_module_of_its_name():
    code = "from zinf.moe.experts import experts; import zinf.moe\n"
    imported(f"{code}assert zinf.moe.experts is experts")


def test_zinf_alone_imports_neither_jax_nor_its_own_engine():
    found = imported("import zinf; assert 'initialize' in dir(zinf)")
    assert found & (HEAVY | ARRAYS) == set()


def test_a_run_imports_flax_only_for_a_model_of_flax():
    found = imported("import zinf.cli.train, zinf.cli.finetune, zinf.models.random_ltd")
    assert "jax" in found
    assert "flax" not in found


def command(arguments: list[str], before: str = "") -> str:
    """Code that runs `zinf` with these arguments, as its entry point does."""
    return f"import sys; sys.argv = {['zinf', *arguments]}\n{before}\n" + (
        "from zinf.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["train", "--help"],
        ["checkpoint", "export", "-h"],
        CHECK,
    ],
    ids=" ".join,
)
def test_help_and_checks_import_no_array_library(arguments):
    found = imported(command(arguments))
    # Typer itself imports pydantic where it is installed.
    assert found & (HEAVY | ARRAYS) <= {"rich", "typer", "pydantic"}


INTERRUPT = """
import os, signal
class Interrupt:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("name", ["zinf.cli.app", "zinf.core.plan.check"])
def test_an_interrupt_while_importing_is_one_line(name):
    code = command(["plan", "configs/quickstart.yaml"], INTERRUPT.format(name=name))
    run = [sys.executable, "-c", code]
    asked = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert (asked.returncode, asked.stderr) == (130, "Interrupted.\n")


def unread(*arguments: str, **environment: str) -> tuple[int, bytes]:
    """Exit code and errors of Python with these arguments, whose output is unread."""
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, *arguments]
    try:
        asked = subprocess.run(
            run,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=writer,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writer)
    return asked.returncode, asked.stderr


@pytest.mark.parametrize("arguments", [["--version"], CHECK])
def test_a_reader_that_went_away_is_no_error(arguments):
    """As in `zinf plan ... | head`."""
    code, errors = unread("-m", "zinf", *arguments)
    assert errors == b""
    assert code in (1, 141)


PRINT = """
import typer
from zinf.cli.errors import clean_errors
try:
    with clean_errors(traceback=False):
        print("a plan", flush=True)
except typer.Exit as ended:
    raise SystemExit(ended.exit_code)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_drive_does_not_take_is_an_error(unbuffered):
    run = [sys.executable, "-m", "zinf", *CHECK]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        asked = subprocess.run(
            run, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE
        )
    assert asked.returncode == 2
    assert "No space left on device" in asked.stderr.decode()
    assert "standard output" in asked.stderr.decode().lower()
    assert "Traceback" not in asked.stderr.decode()


def test_closed_standard_output_is_no_error_and_no_file_gets_its_number():
    """As `zinf ... >&-`, which some services do: libraries print to number 1."""
    code = "from zinf.cli.entry import *; open_closed_streams(); import os; "
    code += "opened = open(os.devnull); assert opened.fileno() > 2; main()"
    for argument in ("--version", "--help"):
        run = f"'{sys.executable}' -c '{code}' {argument} >&-"
        asked = subprocess.run(run, shell=True, cwd=ROOT, stderr=subprocess.PIPE)
        assert (asked.returncode, asked.stderr) == (0, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_a_command_prints_may_stay_unread(unbuffered):
    """Containers often set PYTHONUNBUFFERED: then the failed write leaves no buffer."""
    assert unread("-c", PRINT, PYTHONUNBUFFERED=unbuffered) == (141, b"")
