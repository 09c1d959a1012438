"""One attempt to decide, as its proposer sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kerasdist.transport.membership.events import (
    Decision,
    Member,
    Prepare,
    Promise,
    SuspensionReport,
    is_quorum,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A ballot: the promises it has received, then the votes for its proposal.

    Attributes:
        request: The request for promises.
        promises: Those received.
        proposal: What is proposed; None as long as promises are missing.
        votes: Members that have accepted the proposal.
    """

    request: Prepare
    promises: tuple[tuple[Member, Promise], ...] = ()
    proposal: Decision | None = None
    votes: frozenset[Member] = frozenset()

    def with_promise(self, sender: Member, promise: Promise) -> Attempt:
        """Return this attempt with one promise more."""
        promises = dict(self.promises) | {sender: promise}
        return dataclasses.replace(self, promises=tuple(promises.items()))

    def with_proposal(self, proposal: Decision) -> Attempt:
        """Return this attempt with a proposal."""
        return dataclasses.replace(self, proposal=proposal)

    def with_vote(self, sender: Member) -> Attempt:
        """Return this attempt with one vote more."""
        return dataclasses.replace(self, votes=self.votes | {sender})

    def awaits(self, silent: frozenset[Member]) -> bool:
        """Return whether a member in contact, or a quorum, hasn't promised yet."""
        promised = dict(self.promises)
        members = self.request.base.epoch.members
        if set(members) - self.request.dead - silent - promised.keys():
            return True
        return not self.is_quorum(promised)

    def has_no_elder(self) -> bool:
        """Return whether all elders are dead, and all others have promised."""
        epoch = self.request.base.epoch
        others = set(epoch.members) - self.request.dead
        return (
            epoch.elders <= self.request.dead and others <= dict(self.promises).keys()
        )

    def is_quorum(self, voters: Collection[Member]) -> bool:
        """Return whether `voters` may decide."""
        return is_quorum(voters, self.request.base.epoch.members, self.request.dead)

    def earlier(self) -> Decision | None:
        """Return what must be proposed, since it may have been decided already."""
        accepted = [
            promise.accepted
            for _, promise in self.promises
            if promise.accepted is not None
        ]
        return max(accepted, key=lambda each: each[0])[1] if accepted else None

    def reports(self) -> dict[Member, SuspensionReport]:
        """Return the reports of those that have promised."""
        return {member: promise.report for member, promise in self.promises}
