"""Both sides prove the secret, and nothing else gets through."""

from __future__ import annotations

import hashlib
import hmac
import socket

import pytest

from groups import outcomes
from kerasdist import errors
from kerasdist.transport import handshake
from kerasdist.transport.control import read_frame, write_frame
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType, pack_header


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def shake(pair, first, second, hello=None):
    def work(side):
        end = pair[side]
        try:
            if side == 0:
                hi = {"rank": 1} if hello is None else hello
                return handshake.knock(end, first, hi, Deadline(5), "there:1")
            return handshake.receive(end, second, Deadline(5), "here:2")
        finally:
            end.shutdown(socket.SHUT_WR)

    return outcomes(2, work)


@pytest.mark.parametrize("secret", [b"", b"x", b"\xff" * 500])
def test_with_the_same_secret_the_hello_arrives(pair, secret):
    assert shake(pair, secret, secret, {"a": "ü"}) == [None, {"a": "ü"}]


@pytest.mark.parametrize(("first", "second"), [(b"a", b"b"), (b"", b"b"), (b"a", b"")])
def test_with_different_secrets_both_sides_know_why(pair, first, second):
    knocking, receiving = shake(pair, first, second)
    assert type(knocking) is errors.AuthenticationError
    assert type(receiving) is errors.AuthenticationError
    assert str(knocking).startswith(
        "The worker at there:1 doesn't hold the same job secret. Set the environment "
        "variable KERASDIST_SECRET to the same value on all workers"
    )
    assert str(receiving).startswith("The worker at here:2 doesn't hold the same job")


def prove(role, secret, first, second):
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


@pytest.mark.parametrize("cheat", ["reflect", "guess", "skip", "short nonce"])
def test_a_stranger_gets_no_further_than_its_proof(pair, cheat):
    """Without the secret: send back what the other side proves, guess, or skip it."""
    stranger, server = pair

    def work(side):
        if side == 1:
            return handshake.receive(server, b"secret", Deadline(5), "stranger:1")
        deadline = Deadline(5)
        nonce = b"n" * (8 if cheat == "short nonce" else 32)
        write_frame(stranger, FrameType.CHALLENGE, nonce, deadline)
        if cheat == "short nonce":
            return None
        _, _theirs = read_frame(stranger, deadline)
        _, proof = read_frame(stranger, deadline)
        if cheat == "skip":
            write_frame(stranger, FrameType.HELLO, b'{"rank": 1}', deadline)
        else:
            answer = proof if cheat == "reflect" else b"0" * 32
            write_frame(stranger, FrameType.PROOF, answer, deadline)
        return read_frame(stranger, Deadline(1))

    first, refused = outcomes(2, work)
    kind = errors.AuthenticationError if cheat in ("reflect", "guess") else None
    assert type(refused) is (kind or errors.ProtocolError)
    if kind:
        assert first == (FrameType.REFUSAL, b"")


def test_a_false_server_learns_nothing_but_a_nonce(pair):
    client, server = pair

    def work(side):
        if side == 0:
            return handshake.knock(client, b"s", {"rank": 1}, Deadline(5), "there:1")
        deadline = Deadline(5)
        kind, nonce = read_frame(server, deadline)
        write_frame(server, FrameType.CHALLENGE, b"m" * 32, deadline)
        wrong = prove(b"server", b"not the secret", nonce, b"m" * 32)
        write_frame(server, FrameType.PROOF, wrong, deadline)
        return kind, len(nonce), read_frame(server, deadline)

    knocking, seen = outcomes(2, work)
    assert type(knocking) is errors.AuthenticationError
    assert seen == (FrameType.CHALLENGE, 32, (FrameType.REFUSAL, b""))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
            "ProtocolError",
        ),
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
        handshake.receive(server, b"secret", Deadline(5), "stranger:1")
    assert type(caught.value).__name__ == error
    assert "evil" not in str(caught.value)


def test_a_silent_side_is_left_at_the_deadline(pair):
    with pytest.raises(TimeoutError):
        handshake.receive(pair[1], b"secret", Deadline(0.1), "stranger:1")
    with pytest.raises(TimeoutError):
        handshake.knock(pair[0], b"secret", {}, Deadline(0.1), "stranger:1")
