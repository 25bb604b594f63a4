"""What is imported when: nobody waits for a library that their command does not use.

Only names of modules are asserted here. The figures are in zinf/cli/README.md.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What zinf may need in some run, and takes 20 to 500 ms of a processor to import.
HEAVY = {
    "IPython",
    "chex",
    "flax",
    "grain",
    "llvmlite",
    "matplotlib",
    "nbclient",
    "numba",
    "orbax",
    "pandas",
    "plotly",
    "pyarrow",
    "rich",
    "tensorboardX",
    "torch",
    "typer",
    "zarr",
}
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
        "import zinf; f = zinf.initialize\n"
        "def below(cls):\n"
        "    for sub in cls.__subclasses__():\n"
        "        yield sub\n"
        "        yield from below(sub)\n"
        "from pydantic import BaseModel\n"
        "built = [c for c in below(BaseModel) if 'zinf' in c.__module__\n"
        "         and c.__pydantic_complete__]\n"
        "assert zinf.Config in below(BaseModel) and built == [], built\n"
        "import zinf.initialize\n"
        "assert zinf.initialize is f and f.__name__ == 'initialize'\n"
    )
    found = imported(code)
    assert "jax" in found
    assert found & HEAVY == set()


def test_a_function_is_not_replaced_by_the_module_of_its_name():
    code = "from zinf.initialize import plan_only; import zinf\n"
    imported(f"{code}assert zinf.initialize.__name__ == 'initialize'")


def test_zinf_alone_imports_neither_jax_nor_its_own_engine():
    found = imported("import zinf; assert 'initialize' in dir(zinf)")
    assert found & (HEAVY | ARRAYS) == set()
