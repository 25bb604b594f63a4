"""How far the device link runs ahead of its devices. [Note: ahead]

A device runs programs in the order in which it is given them. So the device link gives
it the next program while one still runs, and the device does not wait for Python
between the two. In that order the memory is used as the plan says: what is freed after
a program is free for the next one, and the runtime keeps the memory of a program until
it is complete. With `limit` programs at once:

* An instruction of the device link waits for others of the link, and for the frees of
  device copies after them, only until the device was given their programs.
* Such a free too waits for programs only until the device was given them.
* Instructions of other links wait until the programs are complete, also for those that
  come before a free that they wait for. So a transfer never gets memory that a program
  still uses.
* No program is given ahead of a transfer that is listed before it and that the program
  after it needs. XLA's
  allocator on GPUs lets a transfer use new memory only after all programs that were
  given before it (`kComputeSynchronized` in xla/pjrt/local_device_state.h), so the
  transfer would run after both programs, and not beside the second.
* Nor is one that overwrites what another in flight writes: it may donate the array that
  the completion of the other is read from.

The ledger counts memory in the order of the programs. The proof of [Note: fences] holds
for it, and for the memory of the device, whose programs run in an order of the plan.
"""

from collections.abc import Iterable, Sequence

from zinf.core.plan import Free, Instruction, Link
from zinf.core.program import Tier


class Ahead:
    """What each instruction of a plan waits for.

    Attributes:
        limit: programs that a device has at most, the running one included. With 1 each
            program is complete before the next one is given.
    """

    def __init__(self, instructions: Sequence[Instruction], limit: int):
        self.limit = limit
        self._instructions = instructions
        # Instructions in the order of the device's programs. For each free among them,
        # the last program that it or an earlier free comes after: links run in order,
        # so who waits for a free relies on the earlier ones too.
        self._in_order = bytearray(len(instructions))
        self._freed_by: dict[int, int] = {}
        self._next_fetch: dict[int, int] = {}
        if limit == 1:
            return
        program = last_program = -1
        for index, instruction in enumerate(instructions):
            if instruction.link == Link.DEVICE:
                self._in_order[index] = 1
                early = (i for i in instruction.after if i < program)
                fetches = [i for i in early if self._is_on(Link.H2D, i)]
                self._next_fetch[program] = max(fetches, default=-1)
                program = index
            elif _frees_programs(instruction):
                self._in_order[index] = 1
                before = (i for i in instruction.after if self._is_on(Link.DEVICE, i))
                last_program = max((last_program, *before))
                self._freed_by[index] = last_program

    def waits(self, index: int) -> tuple[Sequence[int], Sequence[int]]:
        """What must be complete before an instruction begins, and what must be given.

        A program is given when it is in the queue of the device; a free in the order of
        programs, when it ran.
        """
        after = self._instructions[index].after
        if self.limit == 1:
            return after, ()
        if not self._in_order[index]:
            programs = [self._freed_by[i] for i in after if i in self._freed_by]
            return (*after, *programs), ()
        complete = [i for i in after if not self._in_order[i]]
        return complete, [i for i in after if self._in_order[i]]

    def next_fetch(self, program: int) -> int:
        """The last transfer before a program that the next one needs; -1: none."""
        return self._next_fetch.get(program, -1)

    def overwrites(self, program: int, in_flight: Iterable[int]) -> bool:
        """Whether a program replaces a copy that one of `in_flight` writes."""
        instruction = self._instructions[program]
        replaced = set(instruction.writes).difference(instruction.creates)
        return any(
            not replaced.isdisjoint(self._instructions[i].writes) for i in in_flight
        )

    def _is_on(self, link: Link, index: int) -> bool:
        return self._instructions[index].link == link


def _frees_programs(instruction: Instruction) -> bool:
    """Whether an instruction frees device copies that programs use last."""
    operation = instruction.operation
    if instruction.link != Link.FREE_AFTER_DEVICE:
        return False
    return isinstance(operation, Free) and operation.tier == Tier.DEVICE
