"""Terms that all packages share, and packages themselves, are one object each."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

import zinf
import zinf.ray
from zinf.core.config import Config
from zinf.core.program import ROUTES, TRANSFER_LINKS, ArrayId, Link, Role, Tier


def test_equal_names_are_one_object():
    name = ArrayId(Role.STATE, "blocks/0/kernel", rows=(0, 4), slot=1)
    assert ArrayId(Role("state"), "blocks/0/kernel", (0, 4), None, 1) is name
    assert replace(name, slot=0) is not name
    assert replace(replace(name, slot=0), slot=1) is name
    assert name.whole.piece((0, 4)) is name
    assert copy.deepcopy(name) is name
    assert pickle.loads(pickle.dumps(name)) is name


def test_every_tier_reaches_every_other_and_has_a_budget():
    for (source, target), tiers in ROUTES.items():
        assert (tiers[0], tiers[-1]) == (source, target)
        links = [TRANSFER_LINKS[hop] for hop in pairwise(tiers)]
        assert len({*links}) == len(tiers) - 1
    assert {link.frees_after for link in TRANSFER_LINKS.values()} < {*Link}
    budgets = [attrgetter(tier.row.budget)(Config()) for tier in Tier]
    assert budgets == [None] * len(Tier)


def test_a_lazy_package_is_pickled_by_name():
    """A function that uses the package may be sent to workers."""
    for package in (zinf, zinf.ray):
        assert pickle.loads(pickle.dumps(package)) is package
