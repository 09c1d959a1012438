"""The members that leave a job as they announce, so that nothing is repeated.

    all        ask whether members want to leave, and which: a collective each
    a leaver   announces it to the machine, see `transport.membership.machine`
    all        finish collectives until the change is made; then a leaver stops

If all members leave, there's no change: they stop together.

These collectives are between two steps, so the others continue with the next step.
"""

from __future__ import annotations

import time

import numpy as np

from kerasdist import errors
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.collectives.elastic.termination import Termination

# Seconds for what precedes the change: the platform ends the process before.
SAVE_SECONDS = 600.0
# Seconds until a leaver ends in any case. The change takes a fraction of a second.
_SECONDS = 10.0
# Seconds for the change, and the end of the process.
LEAVE_SECONDS = 2 * _SECONDS
_POLL_SECONDS = 0.002


class Leaving:
    """A worker's part in the leaving of members, itself among them.

    Args:
        communicator: Between the present members.
        termination: The request to end this process; None: there will be none.
        min_workers: The smallest number of members that continue.

    Attributes:
        termination: See above.
        ids: The members that left last, or are leaving.
    """

    def __init__(
        self,
        communicator: ElasticCommunicator,
        termination: Termination | None,
        min_workers: int,
    ) -> None:
        self.termination = termination
        self.ids: frozenset[int] = frozenset()
        self._communicator = communicator
        self._min_workers = min_workers
        communicator.wants_to_leave = lambda: self.wanted

    @property
    def wanted(self) -> bool:
        """Whether this worker wants to leave."""
        return self.termination is not None and self.termination.requested

    @property
    def ends_job(self) -> bool:
        """Whether the members that stay, if any, are too few to continue."""
        stay = set(self._communicator.ranks) - self.ids
        return len(stay) < self._min_workers

    @property
    def includes_this_worker(self) -> bool:
        """Whether this worker is one of the leaving ones."""
        return self._communicator.ranks[self._communicator.rank] in self.ids

    def agree(self) -> None:
        """Find out which members leave; all call it alike."""
        own = self._communicator.ranks[self._communicator.rank]
        mine = np.array([own, self.wanted], np.int64)
        found = self._communicator.all_gather(mine)
        self.ids = frozenset(int(number) for number, leaves in found if leaves)
        if self.termination is not None and self.includes_this_worker:
            self.termination.extend(SAVE_SECONDS)

    def change(self) -> bool:
        """Let the members leave that have agreed to; all call it alike.

        Returns:
            Whether this worker has left.

        Raises:
            CollectiveError: The others can't continue.
        """
        leaves = self.includes_this_worker
        if self.termination is not None and leaves:
            self.termination.extend(LEAVE_SECONDS)
        everyone = self.ids >= set(self._communicator.ranks)
        try:
            if everyone:
                self._communicator.barrier()
            else:
                self._await_change(leaves)
        except errors.CollectiveError:
            if not leaves:
                raise
        if everyone:
            # No member is left to agree with. The end of the others, which is next,
            # must not break the group: parameter servers wait for a goodbye through it.
            self._communicator.membership.close()
            return True
        # A later process with the task of one of them may be lost.
        self.ids = frozenset()
        return leaves

    def _await_change(self, leaves: bool) -> None:
        communicator = self._communicator
        membership = communicator.membership
        epoch, deadline = communicator.epoch, time.monotonic() + _SECONDS
        while True:
            in_time = time.monotonic() < deadline
            if leaves and not in_time:
                return  # the others will notice the loss
            pending = membership.leave() if leaves else membership.admit(False)
            pending |= in_time and communicator.epoch == epoch
            flags = np.array([pending], np.int64)
            if not communicator.all_reduce([flags], "max")[0][0]:
                return
            time.sleep(_POLL_SECONDS)
