"""The docstring of each key of a section: the string below its annotation.

Pydantic's own `use_attribute_docstrings` reads the source when a class is made, which
took a tenth of the time of `import zinf`. This module reads it when a description is
shown.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise


@cache
def docstrings(cls: type) -> Mapping[str, str]:
    """For each annotated attribute of a class, the string below it, as one line.

    Attributes of base classes are included. The source of the class must be there.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        if base.__module__.partition(".")[0] == cls.__module__.partition(".")[0]:
            found |= docstrings(base)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, after in pairwise(definition.body):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found
