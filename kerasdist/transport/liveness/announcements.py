"""Announcements of the chief's actions to the other ranks, outside of collectives.

    C: rank 0          W: another rank, which waits for an action of C

    1. C -> all  STATE  in its n-th collective, or after it, C began, finished or failed
                        this action for the k-th time
    2. W -> C    ASK    a request for C's place
    3. C -> W    PLACE  the number of the collective that C is in, or was in last

The chief doesn't wait, and isn't affected by other ranks' waits. Between two
collectives all ranks run the same part of the script. So C announces an action there
before its next collective, or never: 3. ends the wait for an action that C doesn't do.
The messages of one connection keep their order, and no reply overtakes an announcement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal

from kerasdist.cluster.address import split_address
from kerasdist.errors import ProtocolError
from kerasdist.transport.framing import Count, read_record, to_object

# Disconnecting connections that another library of this process made.
#
# A wait for a frozen machine in TensorFlow's runtime never ends: it has no heartbeats.
# Shutting the connection down from this side ends such a wait.

_DESCRIPTORS = "/dev/fd"


def disconnect(address: str) -> int:
    """Shut down all TCP connections of this process to an address.

    Their descriptors stay open: their owner closes them.

    Args:
        address: `"host:port"` of the other side, as the owner dialed it.

    Returns:
        The number of connections that were shut down.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return 0
    targets = {(_plain(info[4][0]), port) for info in found}
    count = 0
    for sock in open_sockets():
        # Closed meanwhile, no connection, or one that is over already.
        with contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                peer = sock.getpeername()
                if (_plain(peer[0]), peer[1]) in targets:
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def open_sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process, each until the next one is asked for."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            sock = socket_of(int(name))
        except OSError:  # closed meanwhile, or no socket
            continue
        with sock:
            yield sock


def socket_of(descriptor: int) -> socket.socket:
    """Return a socket's descriptor as an object, which closes only a copy of it.

    Raises:
        OSError: It isn't a socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _plain(host: object) -> str:
    """Normalize an IPv4-mapped IPv6 address to IPv4."""
    return str(host).removeprefix("::ffff:").partition("%")[0]


# Topics that are remembered.
_MOST_TOPICS = 1000
# Seconds until the request is sent to the chief again; doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Announcement:
    """The chief's last announcement of a topic.

    Attributes:
        topic: The action.
        place: Number of the chief's last collective when it began.
        count: Number of its begins since this collective.
        state: "begun", "done" or "failed".
        facts: Details: a JSON object.
    """

    topic: str
    place: Count
    count: Count
    state: Literal["begun", "done", "failed"]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitOutcome:
    """The end of a wait.

    Attributes:
        kind: "done", "failed"; "past": the chief continued without it; "elsewhere": it
            has done other actions alone; "gone": the chief can't do it any more;
            "late": it hasn't begun by the deadline; "busy": it has begun, but not
            finished; "mine": this worker is the chief now.
        facts: Those of the announcement.
        reason: Why the chief can't do it.
        known: Whether the chief has ever begun it, if it's gone.
    """

    kind: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""
    known: bool = False


class Announcements:
    """The announcements of one job, as one rank makes or receives them. Thread-safe.

    Args:
        rank: This worker's rank.
        send: Sends a JSON object to a rank, or to all others for None, soon.
        place: Returns the number of the collective that this rank is in, or was in
            last.
        gone: Returns why the chief can't do anything more, or None. It may raise the
            failure that ended this worker's part in the job.
        seconds: How long the others wait for the chief to begin, and then to finish.

    Attributes:
        seconds: See above.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[dict[str, Any], int | None], None],
        place: Callable[[], int],
        gone: Callable[[], str | None],
        seconds: float,
    ) -> None:
        self.seconds = seconds
        self._rank = rank
        self._send = send
        self._place = place
        self._gone = gone
        self._changed = threading.Condition()
        # The chief's own, or what was received from it.
        self._last: OrderedDict[str, Announcement] = OrderedDict()
        self._chiefs_place = 0
        # Number of this rank's waits for a topic since a collective.
        self._waited: OrderedDict[str, tuple[int, int]] = OrderedDict()

    @property
    def announces(self) -> bool:
        """Whether this worker is the chief."""
        return self._rank == 0

    # On the chief.

    def begin(self, topic: str) -> None:
        """Announce that the chief begins an action."""
        place = self._place()
        with self._changed:
            last = self._last.get(topic)
            count = last.count + 1 if last is not None and last.place == place else 1
            begun = Announcement(
                topic=topic, place=place, count=count, state="begun", facts={}
            )
            self._announce(begun)

    def end(self, topic: str, facts: dict[str, Any], *, failed: bool = False) -> None:
        """Announce that the chief finished, or failed, the action that it began.

        Args:
            topic: As in `begin`.
            facts: Details for the others.
            failed: Whether it failed.
        """
        with self._changed:
            last = self._last[topic]
            state: Any = "failed" if failed else "done"
            self._announce(dataclasses.replace(last, state=state, facts=facts))

    def _announce(self, found: Announcement) -> None:
        self._keep(found)
        self._send({"do": "state", **to_object(found)}, None)

    # On the others.

    def wait(self, topic: str, *, own: bool = False) -> WaitOutcome:
        """Wait until the chief has done the action that is next in this rank's script.

        Args:
            topic: The action.
            own: Whether it's likely to be this rank's alone: then it ends, too, when
                the chief has only ever done others.

        Raises:
            CollectiveError: The failure that ended the job.
        """
        place = self._place()
        with self._changed:
            before, count = self._waited.pop(topic, (place, 0))
            count = count + 1 if before == place else 1
            self._waited[topic] = (place, count)
            while len(self._waited) > _MOST_TOPICS:
                self._waited.popitem(last=False)
        began, pause, begun = time.monotonic(), _FIRST_PAUSE, False
        while True:
            outcome = self._look(topic, place, count)
            if outcome is not None and outcome.kind != "busy":
                return outcome
            if outcome is None and own and self._last and topic not in self._last:
                return WaitOutcome(kind="elsewhere")
            if outcome is not None and not begun:
                began, begun = time.monotonic(), True
            reason = self._gone()
            if reason is not None:
                # Between the two looks its last announcements may have arrived.
                outcome = self._look(topic, place, count)
                if outcome is not None and outcome.kind != "busy":
                    return outcome
                known = topic in self._last
                return WaitOutcome(kind="gone", reason=reason, known=known)
            left = began + self.seconds - time.monotonic()
            if left <= 0:
                return WaitOutcome(kind="busy" if begun else "late")
            self._send({"do": "ask"}, 0)
            with self._changed:
                self._changed.wait(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self, topic: str, place: int, count: int) -> WaitOutcome | None:
        with self._changed:
            found = self._last.get(topic)
            if found is not None and (found.place, found.count) >= (place, count):
                if found.state == "begun":
                    # Or interrupted it, by Ctrl-C for instance.
                    gone_on = self._chiefs_place > found.place
                    return WaitOutcome(kind="past" if gone_on else "busy")
                mine = (found.place, found.count) == (place, count)
                # A later attempt doesn't show how this one ended.
                failed = mine and found.state == "failed"
                return WaitOutcome(
                    kind="failed" if failed else "done", facts=found.facts
                )
            return WaitOutcome(kind="past") if self._chiefs_place > place else None

    # Received messages, from any thread.

    def receive(self, sender: int, value: dict[str, Any]) -> None:
        """Handle a message.

        Args:
            sender: The rank that sent it.
            value: The message.

        Raises:
            ProtocolError: It's damaged, or unexpected.
        """
        do = value.get("do")
        if self._rank == 0 and do == "ask":
            self._send({"do": "place", "place": self._place()}, sender)
        elif self._rank != 0 and sender == 0 and do == "place":
            place = read_record(value.get("place"), Count, "An announcement")
            with self._changed:
                self._chiefs_place = max(self._chiefs_place, place)
                self._changed.notify_all()
        elif self._rank != 0 and sender == 0 and do == "state":
            found = read_record(value, Announcement, "An announcement")
            with self._changed:
                self._keep(found)
                self._changed.notify_all()
        else:
            raise ProtocolError(f"An announcement is unexpected: {value!r:.500}.")

    def _keep(self, found: Announcement) -> None:
        self._last.pop(found.topic, None)
        self._last[found.topic] = found
        while len(self._last) > _MOST_TOPICS:
            self._last.popitem(last=False)
