"""Arguments in pinned host memory, in programs for GPUs that are not there.

A GPU that is only compiled for reports no memories, so jax drops the memory kind of
arguments; that of results it keeps. XLA's compiler takes both. So a program says by its
first operation on an argument where the argument is.
"""

from typing import Any

import jax
from jax.extend.mlir import ir

KIND = "mhlo.memory_kind"
PLACE, PLACEMENT = "annotate_device_placement", "_xla_buffer_placement"
PINNED = "pinned_host"


def keep_pinned(lowered: jax.stages.Lowered) -> None:
    """Tell the compiler which arguments of a lowered program are in pinned host memory.

    They are those that the program only moves to that memory (`jax.device_put`), which
    is then no copy. Donation works as for arguments of a GPU that is there. This
    changes what `lowered` compiles to.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = [
        op
        for op in module.body.operations
        if "sym_name" in op.attributes and _is(op.attributes["sym_name"], "main")
    ]
    with module.context:
        arguments = [{} for _ in main.arguments]
        if "arg_attrs" in main.attributes:
            arguments = [_named(attributes) for attributes in main.arg_attrs]
        for n, argument in enumerate(main.arguments):
            uses = [use.owner for use in argument.uses]
            if uses and all(map(_puts_on_host, uses)):
                arguments[n][KIND] = ir.StringAttr.get(PINNED)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(x) for x in arguments])


def _named(attributes: Any) -> dict[str, Any]:
    return {one.name: one.attr for one in attributes}


def _puts_on_host(operation: Any) -> bool:
    attributes = operation.attributes
    if "call_target_name" not in attributes:
        return False
    if not _is(attributes["call_target_name"], PLACE):
        return False
    frontend = attributes["mhlo.frontend_attributes"]
    return _is(frontend[PLACEMENT], PINNED)


def _is(attribute: Any, text: str) -> bool:
    return ir.StringAttr(attribute).value == text
