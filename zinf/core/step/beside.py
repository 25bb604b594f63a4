"""Two compiled programs in one pass over the weights.

Both read the same parameters and overwrite the same caches. Their segments take turns:
those of the second program follow those of the first that read the same parameters, so
a weight is fetched once for both. Each runs its own executables, so its numbers are
those of a pass of its own, to the bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from zinf.core.program import ArrayId, Program
from zinf.core.segment import Segmented
from zinf.core.step.forward import Forward
from zinf.core.step.shrink import Compiled

Of = TypeVar("Of")


def alone(
    forward: Forward, prefix: str, microbatches: Sequence[int]
) -> tuple[Segmented, Compiled]:
    """A program for some microbatches, with a prefix before the names of its values.

    Caches, parameters and executables are those of the program itself. If it reads
    experts on demand, there must be no prefix.
    """
    program, layouts = forward.segmented.program, forward.layouts
    assert not (prefix and program.chosen), "slots of experts belong to one program"
    caches = set(program.caches)

    def named(name: str) -> str:
        return name if name in caches else prefix + name

    def all_named(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(named, names))

    segments = tuple(
        replace(
            segment,
            spec=replace(
                segment.spec,
                name=prefix + segment.spec.name,
                inputs=all_named(segment.spec.inputs),
                outputs=all_named(segment.spec.outputs),
                microbatches=tuple(microbatches),
            ),
        )
        for segment in forward.segments
    )
    program = replace(
        program,
        segments=tuple(segment.spec for segment in segments),
        values={named(name): spec for name, spec in program.values.items()},
        batch=all_named(program.batch),
        consts=all_named(program.consts),
        outputs=all_named(program.outputs),
    )
    consts = {named(n): content for n, content in forward.segmented.consts.items()}
    values = {named(name): layout for name, layout in layouts.values.items()}
    segmented = replace(forward.segmented, program=program, consts=consts)
    return segmented, Compiled(segments, replace(layouts, values=values))


def together(
    first: Forward, second: Forward, prefix: str, microbatches: Sequence[int]
) -> tuple[Segmented, Compiled]:
    """Two programs in one pass: all microbatches of the first, some of the second.

    Args:
        prefix: before the names of the values of the second; see `alone`.
        microbatches: those of the second.
    """
    assert not first.segmented.program.chosen
    added, compiled = alone(second, prefix, microbatches)
    segmented, program = first.segmented, first.segmented.program
    assert set(program.caches) == set(added.program.caches)
    order = _turns(program, added.program)

    def mixed(of_first: Sequence[Of], of_second: Sequence[Of]) -> tuple[Of, ...]:
        return tuple(
            (of_second if is_second else of_first)[k] for is_second, k in order
        )

    segments = mixed(first.segments, compiled.segments)
    program = replace(
        program,
        segments=tuple(segment.spec for segment in segments),
        values=program.values | added.program.values,
        batch=program.batch + added.program.batch,
        consts=program.consts + added.program.consts,
        outputs=program.outputs + added.program.outputs,
    )
    mixed_segmented = replace(
        segmented,
        program=program,
        shared=mixed(segmented.shared, added.shared),
        consts=segmented.consts | added.consts,
    )
    values = {**first.layouts.values, **compiled.layouts.values}
    layouts = replace(first.layouts, values=values)
    return mixed_segmented, Compiled(segments, layouts)


def _turns(first: Program, second: Program) -> list[tuple[bool, int]]:
    """The segments of both in the order of a pass: is it the second's, its number.

    A segment of the second follows the first one's that is first to read one of its
    parameters, and all of its own program before it.
    """
    reader: dict[ArrayId, int] = {}
    for k, segment in enumerate(first.segments):
        for array in segment.params:
            reader.setdefault(array, k)
    places, reached = [(k, False, k) for k in range(len(first.segments))], 0
    for k, segment in enumerate(second.segments):
        found = [reader[a] for a in segment.params if a in reader]
        reached = max(reached, *found) if found else reached
        places.append((reached, True, k))
    return [(is_second, k) for _, is_second, k in sorted(places)]
