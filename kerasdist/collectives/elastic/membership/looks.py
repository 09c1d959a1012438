"""Looks for members, each in a thread of its own: a contact takes seconds.

One look for a member in an epoch runs at a time; it also answers what is asked for
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kerasdist.collectives.elastic.membership.lines import Contact, Lines
from kerasdist.collectives.elastic.membership.survey import survey
from kerasdist.transport.membership.epochs import Member

ALL = frozenset(Contact)
# The answers that show a loss.
LOSSES = frozenset({Contact.DEAD, Contact.SILENT})
# The answer that proves one.
PROOF = frozenset({Contact.DEAD})

_Found = Callable[[int, Member | None, Contact, frozenset[Contact]], None]


class Looks:
    """The looks of one member for others.

    Args:
        lines: Its lines.
        lock: Held by the caller of `begin` and `for_hosts`.
        found: Called with each answer in the look's thread, with the lock: the epoch,
            the member, the answer, and those that matter.
    """

    def __init__(
        self,
        lines: Lines,
        lock: threading.RLock,
        found: _Found,
    ) -> None:
        self._lines = lines
        self._lock = lock
        self._found = found
        # Those that run, with the answers that matter.
        self._running: dict[tuple[int, Member], frozenset[Contact]] = {}
        self._asks_hosts = False

    def begin(
        self, epoch: int, member: Member | None, counts: frozenset[Contact] = ALL
    ) -> None:
        """Find out what has become of a member.

        Args:
            epoch: The epoch in which it is looked for.
            member: The member; None: a connection broke, and no member is the cause.
            counts: The answers that matter; others change nothing.
        """
        if member is not None:
            known = self._running.get((epoch, member))
            self._running[epoch, member] = counts | (known or frozenset())
            if known is not None:
                return

        def look() -> None:
            contact = Contact.ALIVE if member is None else self._lines.contact(member)
            with self._lock:
                matter = ALL
                if member is not None:
                    matter = self._running.pop((epoch, member))
                self._found(epoch, member, contact, matter)

        self._start(look)

    def for_hosts(
        self,
        hosts: tuple[Member, ...],
        found: Callable[[bool, tuple[Member, ...]], None],
    ) -> None:
        """Look for other members if all that could admit this worker have ended.

        They may have been lost since it asked for them, and others have joined.

        Args:
            hosts: Those that could admit it.
            found: Called as the one of this object, unless such a look runs: whether
                all hosts are dead, and the members of another process's epoch then;
                none if no process is a member.
        """
        if self._asks_hosts:
            return
        self._asks_hosts = True

        def look() -> None:
            dead = all(self._lines.contact(host) is Contact.DEAD for host in hosts)
            answers = survey(self._lines, members=True).answers if dead else []
            with self._lock:
                self._asks_hosts = False
                found(dead, answers[0].members if answers else ())

        self._start(look)

    def _start(self, look: Callable[[], None]) -> None:
        threading.Thread(target=look, name="kerasdist-contact", daemon=True).start()
