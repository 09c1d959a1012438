import functools
import socket
import tempfile
from pathlib import Path
from typing import Any

from certificates import Authority
from groups import in_threads
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.tls import Credentials, accept_tls, connect_tls, wrap


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory()


@functools.cache
def _credentials() -> Credentials:
    authority = Authority(folder=Path(_folder().name))
    found = Credentials.read({"KERASDIST_TLS": authority.issue()})
    if found is None:
        raise ValueError("KERASDIST_TLS isn't read.")
    return found


def tls_pair(pair: Any = None) -> tuple[socket.socket, socket.socket]:
    """The two ends of a TLS connection: of the side that dialed, and the other."""
    one, other = pair or tcp_pair()
    ends = [wrap(each, _credentials(), server=each is other) for each in (one, other)]
    in_threads(
        2, lambda i: (connect_tls, accept_tls)[i](ends[i], Deadline(10), "there:1")
    )
    for end in ends:
        end.setblocking(True)
    return tuple(ends)
