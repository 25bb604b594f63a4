"""Segments of a program that lies whole on one device."""

from zinf.core.program import ArrayId, Role
from zinf.core.segment import compile_segments
from zinf.core.sharding import layouts_on_one


def compiled_on(device, segmented):
    leaves = segmented.program.leaves
    specs = {ArrayId(Role.PARAM, leaf.path): leaf.spec for leaf in leaves}
    layouts = layouts_on_one(device, specs).with_inputs(segmented.program)
    return compile_segments(segmented, layouts)[0]
