"""Connections that are ended from outside of what made them."""

from __future__ import annotations

import socket

import pytest

from kerasdist.transport.liveness.disconnect import disconnect


def test_it_ends_connections_to_one_address_alone():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
        socket.create_connection(one.getsockname()) as to_one,
        socket.create_connection(two.getsockname()) as to_two,
    ):
        assert disconnect(f"127.0.0.1:{one.getsockname()[1]}") == 1
        assert to_one.recv(1) == b""
        to_two.setblocking(False)
        with pytest.raises(BlockingIOError):
            to_two.recv(1)


def test_without_connections_there_is_nothing_to_end():
    assert disconnect("127.0.0.1:1") == 0
    assert disconnect("no-such-host.invalid:1") == 0
