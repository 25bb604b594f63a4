"""A printed plan is documentation: this is the whole of a small one."""

from tests.toy.program import LeafCase, chain
from zinf.plan import Link, Plan, StepOptions, build
from zinf.program import Tier

PRINTED = """\
17 instructions, predicted 1.4 ms a step

tier     at rest      peak    budget
device       0 B  2.21 KiB  1.00 MiB
host    2.00 KiB  4.05 KiB  1.00 MiB
nvme    1.00 KiB  1.00 KiB  1.00 MiB

link        bytes a step    busy
nvme read       1.00 KiB  0.2 ms
nvme write      1.00 KiB  0.2 ms
h2d             1.12 KiB  0.2 ms
d2h             1.01 KiB  0.4 ms
host            3.00 KiB  0.6 ms  binds
device                 -  0.4 ms

 #  link        operation                               bytes  start ms  end ms
 0  nvme read   fetch param/layer0/w                 1.00 KiB       0.0     0.2
 1  h2d         fetch param/layer0/w +1              1.12 KiB       0.2     0.4
 2  device      loss layer0 @0                                      0.4     0.6
 3  free        free param/layer0/w +1 on device     1.12 KiB       0.6     0.6
 4  free        free value/batch/x@0 on host            128 B       0.4     0.4
 5  d2h         offload value/out/0@0                     4 B       0.6     0.8
 6  free        free value/out/0@0 on device              4 B       0.8     0.8
 7  device      norm gradient/layer0/w                              0.6     0.8
 8  d2h         offload norm/layer0 +1               1.00 KiB       0.8     1.0
 9  free        free norm/layer0 +1 on device        1.00 KiB       1.0     1.0
10  host        decide on the update: loss                          0.8     1.0
11  host        update layer0                        3.00 KiB       1.0     1.2
12  free        free gradient/layer0/w on host       1.00 KiB       1.2     1.2
13  nvme write  offload param/layer0/w               1.00 KiB       1.2     1.4
14  free        free param/layer0/w on host          1.00 KiB       1.4     1.4
15  host        decide on the update: gradient norm                 1.2     1.4
16  free        free norm/layer0 on host                  4 B       1.4     1.4"""


def plan_of(param: Tier = Tier.NVME) -> Plan:
    toy = chain(1, leaf=LeafCase("w", 4))
    homes = toy.homes(param, Tier.HOST)
    capacity = dict.fromkeys(Tier, 1 << 20)
    options = StepOptions(1, True, Tier.DEVICE, Tier.HOST)
    return build(toy.catalog(homes), toy.units(homes), capacity, options)


def test_printed_lines_fit_a_screen() -> None:
    assert max(map(len, PRINTED.splitlines())) <= 88


def test_a_plan_prints_every_instruction_below_a_summary() -> None:
    assert str(plan_of()) == PRINTED


def test_the_summary_leaves_out_tiers_and_links_that_are_not_used() -> None:
    toy = chain(1)
    homes = toy.homes(Tier.DEVICE, Tier.DEVICE)
    capacity = {Tier.DEVICE: 1 << 20, Tier.HOST: 1 << 20, Tier.NVME: 0}
    options = StepOptions(1, True, Tier.DEVICE, Tier.HOST)
    plan = build(toy.catalog(homes), toy.units(homes), capacity, options)
    assert "nvme" not in plan.summary()


def test_bytes_of_links_add_up_and_homes_are_not_printed() -> None:
    plan = plan_of()
    moved = sum(x.nbytes for x in plan.instructions if x.link == Link.NVME_READ)
    assert plan.link_bytes(Link.NVME_READ) == moved > 0
    assert "homes=" not in repr(plan)
    assert plan.tiers == set(Tier)
    assert plan.timeline is plan.timeline
