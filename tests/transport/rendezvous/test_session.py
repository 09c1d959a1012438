"""Workers come together, or each that came says who is missing and why."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time

import pytest

from groups import (
    addresses_of,
    close_all,
    in_threads,
    join,
    nothing_stays_open,
    outcomes,
)
from kerasdist import errors
from kerasdist.transport import Timeouts
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.listener import Listener

pytestmark = pytest.mark.timeout(90)

# For starts that fail: long enough for those who come, also on a busy machine.
QUICK = Timeouts(startup=2.0)
LONG = Timeouts(startup=80.0)
# Less than LONG, and far more than QUICK.
SOON = 40.0


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with nothing_stays_open():
        yield


@pytest.mark.parametrize("size", [2, 5])
def test_all_know_all(size):
    addresses = addresses_of(size)
    # JSON changes them, on all ranks.
    settings = {"shape": (1, 2), "names": {1: "a"}}
    sessions = in_threads(
        size,
        lambda r: join(
            addresses, r, settings=settings, host="ab"[r % 2], replicas=r + 1
        ),
    )
    for rank, session in enumerate(sessions):
        assert (session.rank, session.size) == (rank, size)
        assert [m.rank for m in session.members] == list(range(size))
        assert [m.address for m in session.members] == addresses
        assert [m.replicas for m in session.members] == list(range(1, size + 1))
        assert [str(p) for p in session.peers] == [
            f"rank {r} ({address})" for r, address in enumerate(addresses)
        ]
        assert session.local_ranks() == list(range(rank % 2, size, 2))
        assert session.leaders() == [0, 1]
        assert sorted(session.controls) == (list(range(1, size)) if rank == 0 else [0])
    # Who leaves at once disturbs nobody.
    sessions[1].close()
    close_all(sessions)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_dial_and_answer_connect_two_ranks(hosts):
    addresses = addresses_of(2)

    def work(rank):
        session = join(addresses, rank, host=hosts[rank])
        deadline = Deadline(10)
        with contextlib.closing(session):
            if rank == 0:
                with session.answer("data", 1, deadline) as sock:
                    return sock.family, sock.recv(5)
            with session.dial("data", 0, deadline) as sock:
                sock.sendall(b"hello")
                return sock.family, b"hello"

    family = socket.AF_UNIX if hosts == "aa" else socket.AF_INET
    assert in_threads(2, work) == [(family, b"hello")] * 2


def test_sessions_one_after_the_other_and_several_at_once():
    addresses = addresses_of(3)
    for _ in range(3):
        close_all(in_threads(3, lambda r: join(addresses, r)))
    open_at_once = [in_threads(3, lambda r: join(addresses, r)) for _ in range(3)]

    def work(rank):
        # Kept open: who hangs up before it's answered has never come.
        kept = []
        for sessions in reversed(open_at_once):
            mine, deadline = sessions[rank], Deadline(10)
            if rank == 0:
                kept.append(mine.answer("data", 1, deadline))
            elif rank == 1:
                kept.append(mine.dial("data", 0, deadline))
        return kept

    for sock in itertools.chain(*in_threads(3, work)):
        sock.close()
    for sessions in open_at_once:
        close_all(sessions)


def test_a_start_that_failed_can_be_tried_again():
    """Also by a rank that others, who come for the first time, wait for."""
    addresses = addresses_of(2)
    for _ in range(2):
        with pytest.raises(errors.StartupError):
            join(addresses, 0, Timeouts(startup=0.1))
    close_all(in_threads(2, lambda r: join(addresses, r)))


# Who doesn't come.


@pytest.mark.parametrize("reason", ["nothing listens", "no such name", "doesn't come"])
def test_all_who_came_say_who_did_not_and_why(reason):
    addresses = addresses_of(4)
    expected = {
        "nothing listens": r"connection refused: nothing listens there",
        "no such name": r"its host name doesn't resolve.*",
        "doesn't come": r"it listens there but hasn't connected to rank 0; can it "
        r"reach "
        r"127\.0\.0\.1:\d+, and does it hold the same KERASDIST_SECRET\?",
    }[reason]
    with contextlib.ExitStack() as stack:
        if reason == "no such name":
            addresses[2] = "no-such-host.invalid:2222"
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(
                "KERASDIST_SECRET", "x" * 16
            )
        if reason == "doesn't come":
            host, port = addresses[2].split(":")
            stack.enter_context(socket.create_server((host, int(port))))
        started = time.monotonic()
        came = [0, 1, 3]
        results = outcomes(3, lambda i: join(addresses, came[i], QUICK))
        assert time.monotonic() - started < SOON
    for error in results:
        assert type(error) is errors.StartupError
        assert list(error.missing) == [2]
        assert re.fullmatch(expected, error.missing[2]), error.missing
        assert re.match(
            rf"1 of 4 workers didn't connect within [012](\.\d+)? s:\n  rank 2 "
            rf"\({re.escape(addresses[2])}\): {expected}\nStart the missing workers",
            str(error),
        ), str(error)


def test_without_the_chief_the_others_say_so():
    addresses = addresses_of(3)
    results = outcomes(2, lambda i: join(addresses, i + 1, QUICK))
    for error in results:
        assert type(error) is errors.StartupError
        assert error.missing == {0: "connection refused: nothing listens there"}
        assert str(error).startswith(
            f"Rank 0 ({addresses[0]}) couldn't be reached within 2 s: connection refus"
        )


def test_who_waits_shortest_gets_the_reasons_too():
    """The chief came later and would wait on; but then rank 1 would be gone."""
    addresses = addresses_of(4)
    started = time.monotonic()
    results = outcomes(2, lambda r: join(addresses, r, (LONG, QUICK)[r]))
    assert time.monotonic() - started < SOON
    assert [sorted(error.missing) for error in results] == [[2, 3], [2, 3]]


# Interrupts.


@pytest.mark.parametrize("what", ["dial", "answer"])
def test_interrupt_ends_a_wait_for_a_connection(what):
    addresses = addresses_of(2)
    sessions = in_threads(2, lambda r: join(addresses, r, host=str(r)))
    mine = sessions[0]
    if what == "dial":
        sessions[1].close()  # nobody listens there: it would try again and again

    def work(number):
        if number == 0:
            getattr(mine, what)("data", 1, Deadline(60))
        mine.interrupt()

    started_at = time.monotonic()
    assert type(outcomes(2, work)[0]) is Aborted
    assert time.monotonic() - started_at < SOON
    close_all(sessions)


def test_threads_that_close_a_session_at_once_release_its_listener_once(monkeypatch):
    """A failed job's closer and the script: another strategy lost its listener."""
    addresses = addresses_of(2)
    first = in_threads(2, lambda r: join(addresses, r))
    second = in_threads(2, lambda r: join(addresses, r))
    released = []

    def release(listener, original=Listener.release):
        released.append(original(listener))

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "release", release)
        in_threads(16, lambda i: first[i % 2].close())
    assert len(released) == 2
    in_threads(
        2,
        lambda r: (
            second[0].answer("data", 1, Deadline(10)).close()
            if r == 0
            else second[1].dial("data", 0, Deadline(10)).close()
        ),
    )
    close_all(second)


def test_an_answer_that_never_comes_is_an_error_that_names_the_rank():
    addresses = addresses_of(2)
    sessions = in_threads(2, lambda r: join(addresses, r))
    with pytest.raises(
        errors.StartupError,
        match=rf"^rank 1 \({addresses[1]}\) didn't connect to this worker within 0",
    ):
        sessions[0].answer("data", 1, Deadline(0.1))
    close_all(sessions)
