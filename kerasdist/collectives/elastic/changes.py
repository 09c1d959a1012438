"""The changes of an elastic job's members, as this worker has seen them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kerasdist.transport.membership.epochs import Member


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the members.

    Attributes:
        text: A sentence about it.
        before: The number of workers before it.
        workers: The number of workers after it.
        seconds: The time without a group, on this worker.
        agreed: When the members were decided, in seconds of the system's clock.
        connected: When they were connected.
    """

    text: str
    before: int
    workers: int
    seconds: float
    agreed: float
    connected: float

    @property
    def began(self) -> float:
        """The time at which training was suspended."""
        return self.connected - self.seconds


def differences(
    before: Sequence[Member],
    after: Sequence[Member],
    name: Callable[[Member], str],
    preempted: Sequence[Member] = (),
    servers: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> str:
    """Return in words which members were lost, have left, and were added.

    Args:
        before: The members before the change.
        after: Those after it.
        name: Returns the name of a member.
        preempted: Those that leave as they have announced.
        servers: The names of the servers before and after the change.
    """
    missing = [each for each in before if each not in after]
    earlier, later = servers
    lost = [name(each) for each in missing if each not in preempted]
    lost += [server for server in earlier if server not in later]
    added = [name(each) for each in after if each not in before]
    if earlier:  # else this worker was alone, and didn't know the servers
        added += [server for server in later if server not in earlier]
    parts = [
        f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} {verb}"
        for names, verb in (
            (lost, "lost"),
            ([name(e) for e in missing if e in preempted], "preempted, and left"),
            (added, "added"),
        )
        if names
    ]
    return " and ".join(parts) or "connections between the workers were lost"
