"""Mailboxes of authenticated connections, which wait until a session takes them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.transport.connection import Connection
from kerasdist.transport.deadline import Deadline

MOST_WAITING = 4096

_Key = tuple[str, str, int]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A connection that waits until it's taken, and since when."""

    connection: Connection
    hello: dict[str, Any]
    since: float


class Mailboxes:
    """Connections by session, purpose and rank, as their hellos name these."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In the order of arrival; a rank may have connected more than once.
        self._waiting: dict[_Key, list[_Waiting]] = {}
        self._closed = False

    def put(self, connection: Connection, hello: dict[str, Any]) -> bool:
        """Keep a connection until it's taken; return False after `close`.

        Raises:
            ProtocolError: The hello is incomplete, or too many connections wait.
        """
        session, purpose = hello.get("session"), hello.get("purpose")
        rank = hello.get("rank")
        if (
            not isinstance(session, str)
            or not isinstance(purpose, str)
            or type(rank) is not int
        ):
            raise ProtocolError(f"A hello is incomplete. Received: {hello!r}.")
        with self._changed:
            if self._closed:
                return False
            if sum(len(each) for each in self._waiting.values()) >= MOST_WAITING:
                raise ProtocolError(
                    f"{MOST_WAITING} connections are waiting already; no more are kept."
                )
            # A worker that was started again connects again.
            arrived = self._waiting.setdefault((session, purpose, rank), [])
            arrived.append(_Waiting(connection, hello, time.monotonic()))
            self._changed.notify_all()
        return True

    def take(
        self,
        session: str,
        purpose: str,
        rank: int,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Connection | None:
        """Wait for a connection of `rank` for this session and purpose.

        If there is more than one, the newest counts.

        Returns:
            The connection, now the caller's; None if there was none by the deadline,
            or before `stop` was set (and `interrupt` called).
        """
        key = (session, purpose, rank)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._waiting or self._closed or stop.is_set(),
                deadline.remaining(),
            )
            found = self._waiting.pop(key, [])
        for older in found[:-1]:
            older.connection.close()
        return found[-1].connection if found else None

    def take_any(
        self,
        session: str,
        purpose: str,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> list[tuple[int, Connection, dict[str, Any]]]:
        """Take all connections for this session and purpose; wait for the first.

        Args:
            session: The session.
            purpose: The purpose.
            seconds: How long to wait.
            stop: When this is set (and `interrupt` called), wait no longer.

        Returns:
            Rank, connection and hello of each; those of one rank in order of arrival.
        """
        with self._changed:

            def here() -> list[_Key]:
                return [key for key in self._waiting if key[:2] == (session, purpose)]

            self._changed.wait_for(
                lambda: self._closed or here() or (stop is not None and stop.is_set()),
                seconds,
            )
            return [
                (key[2], each.connection, each.hello)
                for key in here()
                for each in self._waiting.pop(key)
            ]

    def interrupt(self) -> None:
        """Wake all waits, which then check their `stop` events."""
        with self._changed:
            self._changed.notify_all()

    def others(self, session: str, purpose: str) -> dict[int, str]:
        """Return the other sessions of connections for the same purpose, by rank."""
        with self._changed:
            return {
                rank: other
                for other, why, rank in self._waiting
                if why == purpose and other != session
            }

    def drop_stale(self, seconds: float) -> None:
        """Close connections that have ended, or waited for longer than this."""
        oldest = time.monotonic() - seconds
        with self._changed:
            for key, arrived in list(self._waiting.items()):
                for each in list(arrived):
                    if each.since < oldest or each.connection.ended:
                        each.connection.close()
                        arrived.remove(each)
                if not arrived:
                    del self._waiting[key]

    def close(self) -> None:
        """Close all connections, and end all waits."""
        with self._changed:
            self._closed = True
            waiting = [each for key in self._waiting.values() for each in key]
            self._waiting.clear()
            self._changed.notify_all()
        for each in waiting:
            each.connection.close()
