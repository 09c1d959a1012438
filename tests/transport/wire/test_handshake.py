"""Both sides prove the secret, to each other and for one purpose, and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading

import pytest

from groups import addresses_of, outcomes
from kerasdist import errors
from kerasdist.transport import handshake
from kerasdist.transport.deadline import Cancellation, Deadline
from kerasdist.transport.framing import (
    MAGIC,
    VERSION,
    FrameType,
    pack_header,
    read_frame,
    write_frame,
)
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.rendezvous.listener import Listener
from pace import bound
from waiting import wait_until

SECRET = b"the secret of the tests"
HERE = "here:2"
HELLO = {"session": "s", "purpose": "p", "rank": 1}


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def authenticate_as_client(end, secret=SECRET, hello=None, address=HERE, seconds=60.0):
    hello = HELLO if hello is None else hello
    return handshake.authenticate_as_client(
        end, secret, hello, Deadline(seconds), address
    )


def receive(end, secret=SECRET, address=HERE, seconds=60.0):
    return handshake.receive(end, secret, Deadline(seconds), "there:1", address)


def both(pair, first, second):
    """Calls both with their ends, at once; returns what they return or raise."""

    def work(side):
        try:
            return (first, second)[side](pair[side])
        finally:
            with contextlib.suppress(OSError):
                pair[side].shutdown(socket.SHUT_WR)

    return outcomes(2, work)


@pytest.mark.parametrize("secret", [b"", b"x", b"\xff" * 500])
def test_with_the_same_secret_the_hello_arrives(pair, secret):
    hello = {"a": "ü"}
    mine, (heard, theirs) = both(
        pair,
        lambda end: authenticate_as_client(end, secret, hello),
        lambda end: receive(end, secret),
    )
    assert heard == hello
    theirs.check(mine.sign(b"to s"), b"to s")
    mine.check(theirs.sign(b"to c"), b"to c")
    with pytest.raises(errors.ProtocolError, match=r"^A frame isn't the other side's"):
        mine.check(mine.sign(b"to s"), b"to s")


@pytest.mark.parametrize(("first", "second"), [(b"a", b"b"), (b"", b"b"), (b"a", b"")])
def test_with_different_secrets_both_sides_know_why(pair, first, second):
    knocking, receiving = both(
        pair,
        lambda end: authenticate_as_client(end, first),
        lambda end: receive(end, second),
    )
    assert type(knocking) is type(receiving) is errors.AuthenticationError
    assert str(knocking).startswith(
        "The worker at here:2 doesn't hold the same job secret. Set the environment "
        "variable KERASDIST_SECRET to the same value on all workers"
    )
    assert str(receiving).startswith("The worker at there:1 doesn't hold the same job")


def test_with_different_addresses_both_sides_know_why(pair):
    """Each task writes the addresses as it likes: that isn't a wrong secret."""
    knocking, receiving = both(
        pair,
        lambda end: authenticate_as_client(end, address="localhost:2"),
        lambda end: receive(end, address="127.0.0.1:2"),
    )
    assert type(knocking) is type(receiving) is errors.ProtocolError
    assert str(knocking).startswith(
        "The process that listens at localhost:2 belongs to this job, but to another "
    )
    assert "Received: 'localhost:2', this is '127.0.0.1:2'." in str(receiving)


@pytest.mark.parametrize("older", ["client", "server"])
def test_another_version_is_told_so(pair, older):
    """Each side says the same, whoever is the older one."""
    version = VERSION - 1

    def other(end):
        frame = pack_header(FrameType.CHALLENGE, 32) + bytes(32)
        end.sendall(frame.replace(MAGIC + bytes([VERSION]), MAGIC + bytes([version])))
        return read_frame(end, Deadline(60))

    if older == "client":
        told, refused = both(pair, other, receive)
        assert told == (FrameType.REFUSAL, b"")
    else:
        refused, _ = both(pair, authenticate_as_client, other)
    assert type(refused) is errors.ProtocolError
    assert f"Received: version={version}, expected {VERSION}. Install" in str(refused)


# Strangers.


TEXT = json.dumps({"address": HERE, "hello": HELLO}).encode()


def proof_of(secret, label, client, server, text):
    said = hashlib.sha256(bytes([VERSION]) + client + server + text).digest()
    return hmac.new(secret, label + b"\0" + said, hashlib.sha256).digest()


def client(end, text=TEXT, proof=None, nonce=b"c" * 32):
    """The client's part, as documented; returns the server's nonce and last frame."""
    deadline = Deadline(60)
    write_frame(end, FrameType.CHALLENGE, nonce, deadline)
    kind, theirs = read_frame(end, deadline)
    assert kind is FrameType.CHALLENGE
    if text is not None:
        write_frame(end, FrameType.HELLO, text, deadline)
    proof = proof or proof_of(SECRET, b"client", nonce, theirs, text)
    write_frame(end, FrameType.PROOF, proof, deadline)
    return theirs, read_frame(end, deadline)


def test_the_proof_is_of_all_that_was_said(pair):
    """As documented: so that another implementation could follow it."""
    (nonce, told), (hello, _) = both(pair, client, receive)
    proof = proof_of(SECRET, b"server", b"c" * 32, nonce, TEXT)
    assert told == (FrameType.PROOF, proof)
    assert hello == HELLO


@pytest.mark.parametrize(
    ("cheat", "kind", "answer"),
    [
        ({"proof": b"0" * 32}, errors.AuthenticationError, (FrameType.REFUSAL, b"")),
        ({"proof": b"0" * 32, "text": None}, errors.ProtocolError, None),
        ({"nonce": b"n" * 8}, errors.ProtocolError, None),
    ],
    ids=["guess", "skip", "short nonce"],
)
def test_a_stranger_gets_no_further_than_its_proof(pair, cheat, kind, answer):
    """And is given nothing that depends on the secret, for guesses at home."""
    told, refused = both(pair, lambda end: client(end, **cheat), receive)
    assert type(refused) is kind
    if answer:
        assert told[1] == answer
    else:
        assert type(told) is EOFError


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"{}", b'{"address": 3}'])
def test_who_holds_the_secret_and_says_nonsense_is_refused(pair, text):
    _, refused = both(pair, lambda end: client(end, text), receive)
    assert type(refused) is errors.ProtocolError


@pytest.mark.parametrize("cheat", ["guess", "reflect"])
def test_a_false_server_is_found_out(pair, cheat):
    def false(end):
        deadline = Deadline(60)
        read_frame(end, deadline)
        write_frame(end, FrameType.CHALLENGE, b"m" * 32, deadline)
        read_frame(end, deadline)
        _, proof = read_frame(end, deadline)
        answer = proof if cheat == "reflect" else b"0" * 32
        write_frame(end, FrameType.PROOF, answer, deadline)

    knocking, _ = both(pair, authenticate_as_client, false)
    assert type(knocking) is errors.AuthenticationError


# A stranger in the midst: it has no secret, and connects one side with another.


def relay(source, target, change=lambda kind, payload: payload, count=5):
    """Hands the frames of a handshake on, those of one side changed."""
    deadline = Deadline(60)
    turns = [(source, target), (target, source), (source, target), (source, target)]
    for giver, taker in [*turns, (target, source)][:count]:
        kind, payload = read_frame(giver, deadline, bound=1 << 16)
        write_frame(taker, kind, change(kind, payload), deadline)


@pytest.fixture
def jobs():
    """Two listeners of one job, and where strangers have taken a third address."""
    addresses = addresses_of(2)
    listeners = [Listener.acquire(address, SECRET) for address in addresses]
    with socket.create_server(("127.0.0.1", 0)) as false:
        yield listeners, false
    for listener in listeners:
        listener.release()


def ask(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def dial_a_stranger(false, true, change=lambda kind, payload: payload):
    """Dial an address where a stranger hands all on to another listener."""

    def stranger():
        end, _ = false.accept()
        with end, ask(true.address) as other:
            relay(end, other, change)

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        dial_tcp(address_of(false), SECRET, HELLO, Deadline(60))
    finally:
        thread.join(bound(60))


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("oracle", [0, 1])
def test_no_listener_of_the_job_helps_a_stranger_at_anothers_address(jobs, oracle):
    """The chief is dead, a stranger answers at its address, and asks around.

    It hands the worker's challenge to another listener of the job, the worker's own one
    among them. With a proof that held for any listener it became the chief: it got the
    worker's gradients, and gave it any weights it liked.
    """
    listeners, false = jobs
    dialed = address_of(false)
    with pytest.raises(
        errors.ProtocolError,
        match=rf"^The process that listens at {dialed} belongs to this job, but to ",
    ):
        dial_a_stranger(false, listeners[oracle])
    for listener in listeners:
        assert listener.pending.take_any("s", "p", 0.0) == []
    wait_until(listeners[oracle].refusals, "a refusal")
    (text,) = listeners[oracle].refusals()
    assert f"dialed another address. Received: '{dialed}', this is" in text


@pytest.mark.parametrize("name", ["address", "session", "purpose", "rank"])
def test_a_hello_that_was_changed_on_its_way_is_refused(jobs, name):
    """What the connection is for is a part of the proof, whoever the listener is."""
    (listener, _), false = jobs

    def change(kind, payload):
        if kind is not FrameType.HELLO:
            return payload
        said = json.loads(payload)
        if name == "address":
            said["address"] = listener.address
        else:
            said["hello"][name] = 0 if name == "rank" else "another"
        return json.dumps(said).encode()

    with pytest.raises(errors.AuthenticationError):
        dial_a_stranger(false, listener, change)
    for session, purpose in (("s", "p"), ("another", "p"), ("s", "another")):
        assert listener.pending.take_any(session, purpose, 0.0) == []


def test_a_proof_of_one_connection_is_none_in_a_parallel_one(jobs):
    """The stranger opens two, and answers one listener's challenge with the other's."""
    listeners, _ = jobs
    address = listeners[0].address

    def begin():
        sock = ask(address)
        write_frame(sock, FrameType.CHALLENGE, b"n" * 32, Deadline(60))
        read_frame(sock, Deadline(60))
        return sock

    frames = []

    def tap(kind, payload):
        frames.append((kind, payload))
        return payload

    ours, theirs = socket.socketpair()
    with ours, theirs, ask(address) as true, begin() as other:
        thread = threading.Thread(target=relay, args=(theirs, true, tap))
        thread.start()
        handshake.authenticate_as_client(ours, SECRET, HELLO, Deadline(60), address)
        thread.join(bound(60))
        for kind, payload in frames[2:4]:
            write_frame(other, kind, payload, Deadline(60))
        assert read_frame(other, Deadline(60)) == (FrameType.REFUSAL, b"")


# Whatever else comes.


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (pack_header(FrameType.CHALLENGE, 33), "ProtocolError"),
        (pack_header(FrameType.DATA, 32) + b"x" * 32, "ProtocolError"),
        (pack_header(FrameType.REFUSAL, 4) + b"evil", "AuthenticationError"),
        (pack_header(FrameType.CHALLENGE, 32) + b"x", "EOFError"),
        (b"", "EOFError"),
    ],
)
def test_other_beginnings_are_refused_without_repeating_them(pair, sent, error):
    stranger, server = pair
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(Exception, match=r"^.") as caught:
        receive(server)
    assert type(caught.value).__name__ == error
    assert "evil" not in str(caught.value)


def test_a_silent_side_is_left_at_the_deadline(pair):
    with pytest.raises(TimeoutError):
        receive(pair[1], seconds=0.1)
    with pytest.raises(TimeoutError):
        authenticate_as_client(pair[0], seconds=0.1)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_dialing_ends_when_it_is_cancelled(when):
    """The other side is frozen: its kernel accepts, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = address_of(frozen)
        stop = Cancellation()
        if when == "before":
            stop.set()

        def dial(_):
            with pytest.raises((OSError, EOFError)):
                dial_tcp(address, SECRET, HELLO, Deadline(60), stop)

        def cancel(_):
            if when == "meanwhile":
                end, _ = frozen.accept()
                with end:
                    # It has begun to speak: the handshake waits for an answer now.
                    read_frame(end, Deadline(60))
                    stop.set()

        outcome = outcomes(2, lambda i: (dial, cancel)[i](i), 40.0)
        assert outcome == [None, None]
