"""`nox` runs the suite on each supported interpreter that is installed, then lints.

`nox -s slow` runs the tests that are marked slow.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nox

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
# The oldest supported jax, and the last that runs on Python 3.11.
OLDEST_JAX = "jax==0.10.2"

# Each must be of jax's own version.
GPU_COMPILER = ("jax-cuda13-pjrt", "jax-cuda13-plugin")
# Two workers share the tests as in the README's command.
IN_TWO = ("-n", "2", "--dist", "worksteal")

nox.options.sessions = ["tests", "lint"]


def interpreter_folders() -> Iterator[Path]:
    """Where pyenv and uv put interpreters, then PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob("versions/*/bin"))
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", data / "uv/python"))
    yield from sorted(uv.glob("*/bin"))
    yield from map(Path, os.get_exec_path())


def runs(interpreter: Path) -> bool:
    """False also for a pyenv shim, which exists for versions that are not active."""
    asked = subprocess.run([interpreter, "--version"], capture_output=True, check=False)
    return asked.returncode == 0


def interpreters() -> dict[str, Path]:
    """The first working interpreter of each supported version."""
    folders = list(interpreter_folders())
    found = {}
    for version in SUPPORTED:
        candidates = (folder / f"python{version}" for folder in folders)
        working = (path for path in candidates if path.exists() and runs(path))
        if path := next(working, None):
            found[version] = path
    return found


FOUND = interpreters()
# nox looks an interpreter up on PATH, where a shim may stand before the real one.
os.environ["PATH"] = os.pathsep.join(
    [*(str(path.parent) for path in FOUND.values()), os.environ["PATH"]]
)


@nox.session(python=list(FOUND))
def tests(session: nox.Session) -> None:
    """The suite, with the oldest jax on Python 3.11 and the newest elsewhere.

    With arguments of your own, in one process.
    """
    oldest = [OLDEST_JAX] if session.python == "3.11" else []
    session.install("-q", ".[test]", *oldest)
    session.run("python", "-m", "pytest", *(session.posargs or IN_TWO))


@nox.session(python=list(FOUND))
def slow(session: nox.Session) -> None:
    """What `tests` leaves out, with the compilers and packages that it needs."""
    oldest = [OLDEST_JAX] if session.python == "3.11" else []
    session.install("-q", ".[test]", *oldest)
    version_of_jax = "import jax; print(jax.__version__)"
    version = str(session.run("python", "-c", version_of_jax, silent=True)).strip()
    same = [f"{name}=={version}" for name in ("jax", *GPU_COMPILER)]
    session.install("-q", ".[test,tpu-topology,notebooks]", *same)
    arguments = session.posargs or [*IN_TWO, "-m", "slow"]
    session.run("python", "-m", "pytest", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Linter, formatter and type checker."""
    session.install("-q", ".[test]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyrefly", "check")
