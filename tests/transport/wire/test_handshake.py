import contextlib
import hashlib
import hmac
import json
import socket
import threading

import pytest

from groups import addresses_of, outcomes
from kerasdist import errors
from kerasdist.cluster.address import split_address
from kerasdist.transport import framing, handshake
from kerasdist.transport.deadline import Cancellation, Deadline
from kerasdist.transport.framing import (
    MAGIC,
    VERSION,
    FrameType,
    read_frame,
    write_frame,
)
from kerasdist.transport.rendezvous.dial import dial_address
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


def test_another_version_is_told_so(pair):
    version = VERSION - 1

    def older(end):
        frame = framing.pack_header(FrameType.CHALLENGE, 32) + bytes(32)
        end.sendall(frame.replace(MAGIC + bytes([VERSION]), MAGIC + bytes([version])))
        return read_frame(end, Deadline(60))

    told, refused = both(pair, older, receive)
    assert told == (FrameType.REFUSAL, b"")
    assert type(refused) is errors.ProtocolError
    assert f"Received: version={version}, expected {VERSION}. Install" in str(refused)


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


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.filterwarnings("error")
def test_no_listener_of_the_job_helps_a_stranger_at_anothers_address():
    """The chief is dead, a stranger answers at its address, and asks another listener.

    With a proof that held for any listener it became the chief: it got the worker's
    gradients, and gave it any weights it liked.
    """
    (address,) = addresses_of(1)
    listener = Listener.acquire(address, SECRET)

    def stranger():
        near, _ = false.accept()
        with near, socket.create_connection(split_address(address)) as far:
            turns = [(near, far), (far, near), (near, far), (near, far), (far, near)]
            for giver, taker in turns:
                kind, payload = read_frame(giver, Deadline(60), bound=1 << 16)
                write_frame(taker, kind, payload, Deadline(60))

    with contextlib.ExitStack() as undo:
        undo.callback(listener.release)
        false = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        dialed = address_of(false)
        thread = threading.Thread(target=stranger)
        thread.start()
        with pytest.raises(
            errors.ProtocolError,
            match=rf"^The process that listens at {dialed} belongs to this job, but ",
        ):
            dial_address(dialed, SECRET, HELLO, Deadline(60))
        thread.join(bound(60))
        assert listener.pending.take_any("s", "p", 0.0) == []
        wait_until(listener.refusals, "a refusal")
        (text,) = listener.refusals()
        assert f"dialed another address. Received: '{dialed}', this is" in text


def test_dialing_ends_when_it_is_cancelled():
    """The other side is frozen: its kernel accepts, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        stop = Cancellation()

        def cancel():
            end, _ = frozen.accept()
            with end:
                # It has begun to speak: the handshake waits for an answer now.
                read_frame(end, Deadline(60))
                stop.set()

        def dial():
            with pytest.raises((OSError, EOFError)):
                dial_address(address_of(frozen), SECRET, HELLO, Deadline(60), stop)

        assert outcomes(2, lambda i: (dial, cancel)[i](), 40.0) == [None, None]
