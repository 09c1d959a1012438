"""The cost of a change of epoch among many workers, in the pure protocol.

    make bench-membership

The membership machines of all workers are in one process, without sockets or threads.
One worker is lost, of which each other one learns at once; or one joins, after two more
steps. Measured are the CPU seconds that one machine spends on the events that it gets,
with the encoding and decoding of its messages, and the bytes that it sends: for the
proposer, and the most for another member. A loss among 1,000 is to cost the proposer
at most 1 s.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from common import Report, arguments, human_bytes, median, table
from kerasdist.collectives.elastic.consensus import PaxosParticipant
from kerasdist.collectives.elastic.epochs import (
    Install,
    Member,
    Message,
    Send,
    decode,
    encode,
    first_decision,
)

_MOST_SECONDS = 1.0


@dataclasses.dataclass
class Cost:
    """What one machine has spent."""

    seconds: float = 0.0
    sent: int = 0
    messages: int = 0


class Job:
    """The machines of a job, and the messages between them, in order."""

    def __init__(self, size: int) -> None:
        members = tuple(map(Member, range(size)))
        first = first_decision(members)
        self.machines = {member: PaxosParticipant(member, first) for member in members}
        self.costs = {member: Cost() for member in members}
        self.installed: set[Member] = set()
        self._queue: collections.deque[tuple[Member, Member, bytes]]
        self._queue = collections.deque()
        # The last message that was decoded.
        self._last, self._took = b"", 0.0
        self._message: Message | None = None

    def handle(self, member: Member, step: Callable[..., None], *args: object) -> None:
        """Let a machine do a step, and send what it answers."""
        cost = self.costs[member]
        start = time.process_time()
        last: Message | None = None
        machine = self.machines[member]
        for output in machine.handle(step, machine, *args):
            if isinstance(output, Send):
                # As a caller does: one message to many is encoded once.
                if output.message is not last:
                    last, data = output.message, encode(output.message)
                cost.sent += len(data)
                cost.messages += 1
                if output.to in self.machines:
                    self._queue.append((member, output.to, data))
            elif isinstance(output, Install):
                self.installed.add(member)
        cost.seconds += time.process_time() - start

    def deliver(self) -> None:
        """Deliver messages until there are no more."""
        while self._queue:
            sender, to, data = self._queue.popleft()
            if to not in self.machines:
                continue
            if data is not self._last:
                start = time.process_time()
                self._message = decode(data)
                self._last, self._took = data, time.process_time() - start
            # Each receiver would take this time: one of them is measured.
            self.costs[to].seconds += self._took
            self.handle(to, PaxosParticipant.receive, sender, self._message)

    def lose(self, lost: Member) -> None:
        """One is killed, and the others learn it."""
        del self.machines[lost]
        for member in self.machines:
            self.handle(member, PaxosParticipant.bury, lost)
        self.deliver()

    def join(self, new: Member) -> None:
        """One joins, and the others train."""
        others = tuple(self.machines)
        self.machines[new], self.costs[new] = PaxosParticipant(new), Cost()
        self.handle(new, PaxosParticipant.apply, others)
        self.deliver()
        for step in (1, 2):
            for member in others:
                self.handle(member, PaxosParticipant.finish, 0, step)
            self.deliver()


def measure(size: int, change: str) -> tuple[Cost, Cost]:
    """Return the costs of a change to the proposer, and the most to another member."""
    job = Job(size)
    proposer = Member(0)
    if change == "the chief is lost":
        proposer = Member(1)
        job.lose(Member(0))
    elif change == "another one is lost":
        job.lose(Member(size - 1))
    else:
        job.join(Member(size))
    if job.installed != job.machines.keys():
        sys.exit(f"{len(job.installed)} of {len(job.machines)} are in the next epoch.")
    others = [job.costs[each] for each in job.machines if each != proposer]
    return job.costs[proposer], Cost(
        max(each.seconds for each in others),
        max(each.sent for each in others),
        max(each.messages for each in others),
    )


CHANGES = ("another one is lost", "the chief is lost", "one joins")


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.repeats = [3, 10], 1
    report = Report(
        "A change of epoch among many workers",
        options.output,
        packages=(),
        repeats=str(options.repeats),
    )
    rows = []
    samples = report.data["changes"] = {}
    for change in CHANGES:
        for size in options.sizes:
            found = [measure(size, change) for _ in range(options.repeats)]
            samples.setdefault(change, {})[size] = [
                [dataclasses.asdict(cost) for cost in pair] for pair in found
            ]
            row = [change, size]
            for place in (0, 1):
                costs = [pair[place] for pair in found]
                row += [
                    f"{1e3 * median(cost.seconds for cost in costs):.1f}",
                    costs[0].messages,
                    human_bytes(costs[0].sent),
                ]
            rows.append(row)
            if size == max(options.sizes):
                seconds = median(pair[0].seconds for pair in found)
                verdict = "reached" if seconds <= _MOST_SECONDS else "MISSED"
                row.append(f"at most {_MOST_SECONDS:g} s: {verdict}")
            else:
                row.append("")
    head = ["change", "workers", "proposer: CPU, ms", "messages", "bytes"]
    head += ["another one, at most: CPU, ms", "messages", "bytes", ""]
    report.add(table(head, rows))
    report.write()


if __name__ == "__main__":
    main()
