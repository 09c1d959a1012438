import hashlib
import re
import select
import socket
import threading

import pytest

import groups
from groups import addresses_of, in_threads, join, outcomes
from kerasdist import errors
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import FrameType
from kerasdist.transport.rendezvous.dial import dial_address
from kerasdist.transport.rendezvous.listener import Listener
from pace import bound
from waiting import wait_until

# For starts that fail: long enough for those who come, also on a busy machine.
QUICK = Timeouts(startup=3.0)
LONG = Timeouts(startup=100.0)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with groups.nothing_stays_open():
        yield


def test_all_know_all():
    size, addresses = 5, addresses_of(5)
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
        assert session.hosts() == [[0, 2, 4], [1, 3]]
        assert sorted(session.controls) == (list(range(1, size)) if rank == 0 else [0])
    # Who leaves at once disturbs nobody.
    sessions[1].close()
    groups.close_all(sessions)


def test_a_start_that_failed_can_be_tried_again():
    """Also by a rank that others, who come for the first time, wait for."""
    addresses = addresses_of(2)
    for _ in range(2):
        with pytest.raises(errors.StartupError):
            join(addresses, 0, Timeouts(startup=0.1))
    groups.close_all(in_threads(2, lambda r: join(addresses, r)))


REASONS = {
    "nothing listens": r"connection refused: nothing listens there",
    "no such name": r"its host name doesn't resolve.*",
    "doesn't come": r"it listens there but hasn't connected to rank 0; can it reach "
    r"127\.0\.0\.1:\d+, and does it hold the same KERASDIST_SECRET\?",
}


def test_all_who_came_say_who_did_not_and_why(monkeypatch):
    """Of jobs that wait at the same time: each for as long as all others."""
    monkeypatch.setenv("KERASDIST_SECRET", "x" * 16)
    jobs = {reason: addresses_of(4) for reason in REASONS}
    jobs["no such name"][2] = "no-such-host.invalid:2222"
    without_chief, listed, uneven = addresses_of(3), addresses_of(3), addresses_of(4)
    other = [*listed[:2], "127.0.0.1:1"]
    starts = [
        *((jobs[reason], rank) for reason in REASONS for rank in (0, 1, 3)),
        *((without_chief, 1), (without_chief, 2), (listed, 0), (other, 1)),
        *((uneven, 0, LONG), (uneven, 1)),
    ]
    host, port = jobs["doesn't come"][2].split(":")
    with socket.create_server((host, int(port))):
        results = outcomes(len(starts), lambda i: join(*(*starts[i], QUICK)[:3]))
    assert {type(error) for error in results} == {errors.StartupError}
    for error, (addresses, _) in zip(results[:9], starts[:9], strict=True):
        (reason,) = (name for name in jobs if jobs[name] is addresses)
        expected = REASONS[reason]
        assert list(error.missing) == [2]
        assert re.fullmatch(expected, error.missing[2]), error.missing
        assert re.match(
            rf"1 of 4 workers didn't connect within [0-3](\.\d+)? s:\n  rank 2 "
            rf"\({re.escape(addresses[2])}\): {expected}\nStart the missing workers",
            str(error),
        ), str(error)
    for error in results[9:11]:
        assert error.missing == {0: "connection refused: nothing listens there"}
        assert str(error).startswith(
            f"Rank 0 ({without_chief[0]}) couldn't be reached within 3 s: connection r"
        )
    # Another list of workers is told from not coming.
    reason = "it connected, but for another session than rank 0's: does it have the "
    assert results[11].missing[1].startswith(reason)
    # The chief came later and would wait on; but then rank 1 would be gone: who waits
    # shortest gets the reasons, too.
    assert [sorted(error.missing) for error in results[13:]] == [[2, 3], [2, 3]]


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
    groups.close_all(second)


def test_different_settings_are_an_error_on_all_ranks_that_names_them():
    addresses = addresses_of(3)
    results = outcomes(
        3,
        lambda r: join(
            addresses, r, LONG, {"transport": "tcp" if r == 2 else "auto", "n": (1, 2)}
        ),
    )
    for error in results:
        assert type(error) is errors.StartupError
        assert error.missing == {2: "its arguments differ"}
        assert str(error).startswith(
            "Workers were started with different arguments. Received:\n  rank 0: "
            "{'transport': 'auto', 'n': [1, 2]}\n  rank 2: {'transport': 'tcp', "
        )


def test_a_wrong_secret_is_an_error_there_and_is_told_to_all(monkeypatch):
    addresses = addresses_of(3)
    monkeypatch.setenv("KERASDIST_SECRET", "the right secret of the tests")

    def work(rank):
        if rank == 2:
            # Each rank reads the secret once, before its listener is there.
            wait_until(lambda: all(map(started, addresses[:2])), "the listeners")
            monkeypatch.setenv("KERASDIST_SECRET", "the wrong secret of the tests")
        return join(addresses, rank, QUICK)

    *others, mistaken = outcomes(3, work)
    assert type(mistaken) is errors.AuthenticationError
    assert str(mistaken).startswith(f"The worker at {addresses[0]} doesn't hold the")
    for error in others:
        assert type(error) is errors.StartupError
        assert list(error.missing) == [2]
        assert "\nConnections that were refused: 127.0.0.1:" in str(error)
        assert "AuthenticationError: The worker at 127.0.0.1:" in str(error)
        assert "doesn't hold the same job secret" in str(error)


def started(address):
    host, port = address.split(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


def test_without_a_secret_only_loopback_is_accepted(monkeypatch):
    with pytest.raises(
        errors.ClusterError,
        match=r"^This job has no secret, .* workers=\['10\.0\.0\.1:2222'\]\. Set KER"
        r"ASDIST_SECRET to the same random text .* unless you set KERASDIST_INSECURE=1",
    ):
        join(["127.0.0.1:2222", "10.0.0.1:2222"], 0)
    monkeypatch.setenv("KERASDIST_INSECURE", "1")
    with pytest.raises(errors.StartupError):
        join([addresses_of(1)[0], "203.0.113.1:2222"], 0, Timeouts(startup=0.1))


def test_a_secret_that_could_be_guessed_is_refused(monkeypatch):
    """Whoever answers at an address can try guesses against a proof, at home."""
    monkeypatch.setenv("KERASDIST_SECRET", "fifteen chars..")
    with pytest.raises(
        errors.ClusterError,
        match=r"^KERASDIST_SECRET is too short\. Received: 15 bytes, expected at least "
        r"16, .* Set it to the output of `openssl rand -hex 32`, the same on all work",
    ) as caught:
        join(["127.0.0.1:2222", "127.0.0.1:2223"], 0)
    assert "fifteen" not in str(caught.value)


def test_something_else_at_the_chiefs_address_is_an_error_that_says_where():
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}", *addresses_of(1)]

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                sock.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(
            errors.ProtocolError,
            match=rf"^Rank 0 isn't the process at its address {addresses[0]}\. Th",
        ):
            join(addresses, 1)
        thread.join(bound(60))


def hello_of(session, addresses, number, pid=4242, **changes):
    member = {"rank": number, "address": addresses[number], "pid": pid, "replicas": 1}
    member |= {"host": "x", "unix_name": "x"}
    hello = {"session": session, "purpose": "control", "rank": number}
    return hello | {"member": member, "settings": {}, "seconds": 20.0} | changes


def while_the_chief_waits(addresses, visit):
    """Runs `visit(session)` after the chief has begun; then the others come."""
    digest = hashlib.sha256(",".join(addresses).encode()).hexdigest()[:16]

    def work(rank):
        if rank == 0:
            return join(addresses, 0)
        wait_until(lambda: started(addresses[0]), "the chief's listener")
        visit(f"{digest}.1")
        return in_threads(len(addresses) - 1, lambda i: join(addresses, i + 1))

    chief, others = in_threads(2, work)
    assert [m.pid for m in chief.members].count(4242) == 0
    groups.close_all([chief, *others])


def test_the_older_of_two_processes_with_one_rank_is_told():
    addresses = addresses_of(3)
    kept = []

    def visit(session):
        for pid in (4242, 4343):
            hello = hello_of(session, addresses, 1, pid)
            kept.append(dial_address(addresses[0], b"", hello, Deadline(60)))
        # Each connection is welcomed in a thread of its own: either may be first.
        told, _, _ = select.select(kept, [], [], 60)
        assert len(told) == 1
        older = kept.index(told[0])
        first, second = [(4242, 4343), (4343, 4242)][older]
        kind, answer = told[0].read_json(Deadline(60))
        assert kind is FrameType.REFUSAL
        assert answer["message"].startswith(
            f"Two processes connected as rank 1. Received: process {first} (this one) "
            f"and process {second}, which connected later and takes part. Each worker "
            "needs a task "
        )
        kept.pop(1 - older).close()

    while_the_chief_waits(addresses, visit)
    kept[0].close()


def test_one_that_comes_again_during_the_start_is_taken():
    addresses = addresses_of(3)

    def visit(session):
        for number in (1, 2):
            hello = hello_of(session, addresses, number)
            dial_address(addresses[0], b"", hello, Deadline(60)).close()

    while_the_chief_waits(addresses, visit)


NONSENSE = [
    *({"rank": 0}, {"rank": 7}, {"rank": -1}, {"rank": 2}),
    *({"member": None}, {"member": {"rank": 1}}, {"seconds": "x"}, {"seconds": -1}),
]


def test_a_hello_that_makes_no_sense_disturbs_nobody():
    addresses = addresses_of(3)

    def visit(session):
        for changes in NONSENSE:
            hello = hello_of(session, addresses, 1, **changes)
            with dial_address(addresses[0], b"", hello, Deadline(60)) as sock:
                kind, _ = sock.read_json(Deadline(60))
                assert kind is FrameType.REFUSAL, changes

    while_the_chief_waits(addresses, visit)
