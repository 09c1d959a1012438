"""What comes to the chief during the start: the wrong, the twice, the strange."""

from __future__ import annotations

import hashlib
import select
import socket
import threading

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
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.log import background_log
from kerasdist.transport.rendezvous import waiting_notice
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.rendezvous.member import Member
from kerasdist.transport.wire.framing import FrameType
from waiting import wait_until

pytestmark = pytest.mark.timeout(60)

QUICK = Timeouts(startup=2.0)
LONG = Timeouts(startup=20.0)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with nothing_stays_open():
        yield


# Who comes with something else.


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


def test_another_list_of_workers_is_told_from_not_coming():
    addresses = addresses_of(3)
    other = [addresses[0], addresses[1], "127.0.0.1:1"]
    results = outcomes(2, lambda r: join(other if r else addresses, r, QUICK))
    assert (
        results[0]
        .missing[1]
        .startswith(
            "it connected, but for another session than rank 0's: does it have the "
        )
    )


def test_a_wrong_secret_is_an_error_there_and_is_told_to_all(monkeypatch):
    """Each rank reads the secret once, when it starts."""
    addresses = addresses_of(3)
    order = threading.Lock()

    def work(rank):
        with order:
            secret = "wrong" if rank == 2 else "right"
            monkeypatch.setenv("KERASDIST_SECRET", f"the {secret} secret of the tests")
            thread = threading.Thread(target=lambda: results.append(attempt(rank)))
            thread.start()
            # The listener is there as soon as the secret has been read. It may be
            # gone again before anybody looks: rank 2 is refused at once.
            wait_until(
                lambda: started(addresses[rank]) or not thread.is_alive(),
                f"rank {rank}'s listener",
            )
        thread.join(60)

    def attempt(rank):
        try:
            return rank, join(addresses, rank, Timeouts(startup=3))
        except errors.KerasDistError as error:
            return rank, error

    results = []
    in_threads(3, work)
    found = dict(results)
    assert type(found[2]) is errors.AuthenticationError
    assert str(found[2]).startswith(
        f"The worker at {addresses[0]} doesn't hold the sam"
    )
    for rank in (0, 1):
        assert type(found[rank]) is errors.StartupError
        assert list(found[rank].missing) == [2]
        assert "\nConnections that were refused: 127.0.0.1:" in str(found[rank])
        assert "AuthenticationError: The worker at 127.0.0.1:" in str(found[rank])
        assert "doesn't hold the same job secret" in str(found[rank])


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


@pytest.mark.parametrize("address", ["127.0.0.1:2222", "10.0.0.1:2222"])
def test_a_secret_that_could_be_guessed_is_refused(monkeypatch, address):
    """Whoever answers at an address can try guesses against a proof, at home."""
    monkeypatch.setenv("KERASDIST_SECRET", "fifteen chars..")
    with pytest.raises(
        errors.ClusterError,
        match=r"^KERASDIST_SECRET is too short\. Received: 15 bytes, expected at least "
        r"16, .* Set it to the output of `openssl rand -hex 32`, the same on all work",
    ) as caught:
        join([address, "127.0.0.1:2223"], 0)
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
        thread.join(10)


def test_a_session_needs_two_workers():
    with pytest.raises(ValueError, match=r"^A session needs at least two workers\."):
        join(addresses_of(1), 0)


# Who comes twice, or in between.


def hello_of(session, addresses, number, pid=4242, **changes):
    member = Member(
        rank=number,
        address=addresses[number],
        host="x",
        unix_name="x",
        pid=pid,
        replicas=1,
    )
    record = {name: getattr(member, name) for name in Member.__dataclass_fields__}
    hello = {"session": session, "purpose": "control", "rank": number}
    hello["member"] = record
    return hello | {"settings": {}, "seconds": 20.0} | changes


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
    close_all([chief, *others])


def test_the_older_of_two_processes_with_one_rank_is_told():
    addresses = addresses_of(3)
    kept = []

    def visit(session):
        hello = hello_of(session, addresses, 1)
        kept.append(dial_tcp(addresses[0], b"", hello, Deadline(20)))
        hello = hello_of(session, addresses, 1, pid=4343)
        kept.append(dial_tcp(addresses[0], b"", hello, Deadline(20)))
        # Each connection is welcomed in a thread of its own: either may be first.
        told, _, _ = select.select(kept, [], [], 20)
        assert len(told) == 1
        older = kept.index(told[0])
        first, second = [(4242, 4343), (4343, 4242)][older]
        kind, answer = told[0].read_json(Deadline(20))
        assert kind is FrameType.REFUSAL
        assert answer["message"].startswith(
            f"Two processes connected as rank 1. Received: process {first} (this one) "
            f"and process {second}, which connected later and takes part. Each worker "
            "needs a task "
        )
        kept.pop(1 - older).close()

    while_the_chief_waits(addresses, visit)
    kept[0].close()


NONSENSE = [
    *({"rank": 0}, {"rank": 7}, {"rank": -1}, {"rank": 2}),
    *({"member": None}, {"member": {"rank": 1}}, {"seconds": "x"}, {"seconds": -1}),
]


def test_a_hello_that_makes_no_sense_disturbs_nobody():
    addresses = addresses_of(3)

    def visit(session):
        for changes in NONSENSE:
            hello = hello_of(session, addresses, 1, **changes)
            with dial_tcp(addresses[0], b"", hello, Deadline(20)) as sock:
                kind, _ = sock.read_json(Deadline(20))
                assert kind is FrameType.REFUSAL, changes

    while_the_chief_waits(addresses, visit)


def test_a_worker_says_that_it_waits_for_the_chief(monkeypatch, said):
    # It was silent for up to 300 s: nobody could tell it from a job that hangs.
    monkeypatch.setattr(waiting_notice, "FIRST_SECONDS", 0.05)
    addresses = addresses_of(3)
    outcomes(1, lambda _: join(addresses, 1, Timeouts(startup=1.0)))
    background_log.flush(10.0)
    (line,) = [each for each in said() if "has been waiting" in each]
    assert f"this task has been waiting for rank 0 ({addresses[0]})" in line
