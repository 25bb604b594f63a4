"""Texts for what ends a run: which process, what is known of it, what to change."""

from collections.abc import Mapping, Sequence

from zinf.distributed.agreement import processes
from zinf.distributed.limits import Limits
from zinf.distributed.peer import Peer

Peers = Mapping[int, Peer]


def missing(indices: Sequence[int], count: int, limits: Limits, strangers: str) -> str:
    """Processes did not join in time.

    Args:
        strangers: `Strangers.summary`: connections that were dropped, or "".
    """
    meanwhile = f" Process 0 {strangers}." if strangers else ""
    return (
        f"{processes(indices).capitalize()} of {count} did not join within "
        f"{limits.join_seconds:g} s. See why in the output there, or allow more time "
        f"with --join-timeout.{meanwhile}"
    )


def twins(index: int, first: Peer, second: Peer) -> str:
    return (
        f"Two processes have process id {index}: {first.name} and {second.name}. Give "
        "each its own --process-id."
    )


def counts(here: int, index: int, there: object) -> str:
    return (
        f"Process 0 was told that there are {here} processes, process {index} that "
        f"there are {there}. Start all with the same --num-processes."
    )


def unlike(differences: str) -> str:
    return f"The processes are not alike, so none goes on:\n{differences}"


def lost(how: Mapping[int, str], peers: Peers, count: int) -> str:
    first = min(how)
    peer = peers[first]
    return (
        f"{processes(sorted(how)).capitalize()} of {count} {_be(how)} lost: "
        f"{how[first]} ({peer.name}). {peer.last_words} See its own output; one that "
        "was killed, by the system for want of memory or by hand, prints nothing."
    )


def failed(errors: Mapping[int, str], peers: Peers, count: int) -> str:
    """A sentence on the first error only: later ones may be consequences of it."""
    index, text = next(iter(errors.items()))
    return f"Process {index} of {count} ({peers[index].name}) failed: {text}"


def absent(indices: Sequence[int], name: str, peers: Peers) -> str:
    words = peers[indices[0]].last_words
    return (
        f"{processes(indices).capitalize()} did not come to {name!r}, where the others "
        f"waited for {_them(indices)}. {words}"
    )


def hung(peers: Peers, count: int, limits: Limits) -> str:
    """Names the processes that reported least progress: the others wait for them."""
    least = min(peer.num_words for peer in peers.values())
    behind = [index for index, peer in peers.items() if peer.num_words == least]
    peer = peers[behind[0]]
    return (
        f"{processes(behind).capitalize()} of {count} made no progress for "
        f"{limits.hang_seconds:g} s ({peer.name}). {peer.last_words} If that is how "
        "long it takes, allow more with --hang-timeout."
    )


def _be(some: Mapping[int, str]) -> str:
    return "is" if len(some) == 1 else "are"


def _them(some: Sequence[int]) -> str:
    return "it" if len(some) == 1 else "them"
