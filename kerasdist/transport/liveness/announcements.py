"""Announcements: what the chief has done, told to the others outside of collectives.

    C: rank 0          W: another rank, which waits for something that C does

    1. C -> all  STATE  in my n-th collective, or after it, I began, finished or failed
                        to do this for the k-th time
    2. W -> C    ASK    how far are you?
    3. C -> W    PLACE  the number of the collective that I'm in, or was in last

The chief waits for nobody, and whether another rank waits makes no difference to it.
Between two collectives all ranks run the same part of the script. So what C does
there it announces before its next collective, or not at all: 3. ends the wait for
something that C doesn't do. The messages of one connection keep their order, and no
answer overtakes an announcement.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kerasdist.errors import ProtocolError

__all__ = ["Announcement", "Announcements", "Outcome"]

# Topics that are remembered.
_MOST_TOPICS = 1000
# Seconds until the chief is asked again; doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
_STATES = ("begun", "done", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Announcement:
    """What the chief has told of a topic last.

    Attributes:
        topic: What it is about.
        place: Number of the chief's last collective when it began.
        count: How often it has begun that since this collective.
        state: "begun", "done" or "failed".
        facts: More about it: a JSON object.
    """

    topic: str
    place: int
    count: int
    state: str
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a wait has ended.

    Attributes:
        kind: "done", "failed"; "past": the chief has gone on without it; "gone": the
            chief can't do it any more; "late": it hasn't begun by the deadline; "busy":
            it has begun, but not finished.
        facts: Those of the announcement.
        reason: Why the chief can't do it.
    """

    kind: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""


class Announcements:
    """The announcements of one job, as one rank makes or receives them. Thread-safe.

    Args:
        rank: This worker's rank.
        send: Sends a JSON object to a rank, or to all others for None, soon.
        place: Returns the number of the collective that this rank is in, or was in
            last.
        gone: Returns why the chief can't do anything more, or None. It may raise the
            failure that has ended this worker's part in the job.
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
        self._told: OrderedDict[str, Announcement] = OrderedDict()
        self._chiefs_place = 0
        # How often this rank has waited for a topic since a collective.
        self._waited: OrderedDict[str, tuple[int, int]] = OrderedDict()

    # On the chief.

    def begin(self, topic: str) -> None:
        """Announce that the chief begins to do something."""
        place = self._place()
        with self._changed:
            last = self._told.get(topic)
            count = last.count + 1 if last is not None and last.place == place else 1
            self._tell(topic, place, count, "begun", {})

    def end(self, topic: str, facts: dict[str, Any], *, failed: bool = False) -> None:
        """Announce that the chief has done, or failed to do, what it has begun.

        Args:
            topic: As in `begin`.
            facts: What others are told.
            failed: Whether it has failed.
        """
        with self._changed:
            last = self._told[topic]
            state = "failed" if failed else "done"
            self._tell(topic, last.place, last.count, state, facts)

    def _tell(
        self, topic: str, place: int, count: int, state: str, facts: dict[str, Any]
    ) -> None:
        told = Announcement(
            topic=topic, place=place, count=count, state=state, facts=facts
        )
        self._keep(told)
        self._send({"do": "state", **dataclasses.asdict(told)}, None)

    # On the others.

    def wait(self, topic: str) -> Outcome:
        """Wait until the chief has done what this rank's script is about to do, too.

        Args:
            topic: What it is.

        Raises:
            CollectiveError: The failure that has ended the job.
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
            if outcome is not None and not begun:
                began, begun = time.monotonic(), True
            reason = self._gone()
            if reason is not None:
                # Between the two looks its last words may have arrived.
                outcome = self._look(topic, place, count)
                if outcome is not None and outcome.kind != "busy":
                    return outcome
                return Outcome(kind="gone", reason=reason)
            left = began + self.seconds - time.monotonic()
            if left <= 0:
                return Outcome(kind="busy" if begun else "late")
            self._send({"do": "ask"}, 0)
            with self._changed:
                self._changed.wait(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self, topic: str, place: int, count: int) -> Outcome | None:
        with self._changed:
            told = self._told.get(topic)
            if told is not None and (told.place, told.count) >= (place, count):
                if told.state == "begun":
                    # Or left off in the midst of it, by Ctrl-C for instance.
                    gone_on = self._chiefs_place > told.place
                    return Outcome(kind="past" if gone_on else "busy")
                mine = (told.place, told.count) == (place, count)
                # A later attempt doesn't say how this one ended.
                failed = mine and told.state == "failed"
                return Outcome(kind="failed" if failed else "done", facts=told.facts)
            return Outcome(kind="past") if self._chiefs_place > place else None

    # What is received, from any thread.

    def hear(self, sender: int, value: dict[str, Any]) -> None:
        """Take a message.

        Args:
            sender: The rank that has sent it.
            value: What it has sent.

        Raises:
            ProtocolError: It's damaged, or isn't due.
        """
        do = value.get("do")
        if self._rank == 0 and do == "ask":
            self._send({"do": "place", "place": self._place()}, sender)
        elif self._rank != 0 and sender == 0 and do == "place":
            with self._changed:
                place = _whole(value, "place")
                self._chiefs_place = max(self._chiefs_place, place)
                self._changed.notify_all()
        elif self._rank != 0 and sender == 0 and do == "state":
            topic, state, facts = (value.get(n) for n in ("topic", "state", "facts"))
            if (
                not isinstance(topic, str)
                or state not in _STATES
                or not isinstance(facts, dict)
            ):
                raise ProtocolError(f"An announcement is damaged: {value!r:.500}.")
            told = Announcement(
                topic=topic,
                place=_whole(value, "place"),
                count=_whole(value, "count"),
                state=str(state),
                facts=facts,
            )
            with self._changed:
                self._keep(told)
                self._changed.notify_all()
        else:
            raise ProtocolError(f"An announcement isn't due: {value!r:.500}.")

    def _keep(self, told: Announcement) -> None:
        self._told.pop(told.topic, None)
        self._told[told.topic] = told
        while len(self._told) > _MOST_TOPICS:
            self._told.popitem(last=False)


def _whole(value: dict[str, Any], name: str) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ProtocolError(f"An announcement is damaged: {name}={number!r:.100}.")
    return number
