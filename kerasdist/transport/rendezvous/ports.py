"""Ports for those who must be told one before they listen."""

from __future__ import annotations

import socket
from collections.abc import Callable

__all__ = ["on_free_port"]

_ATTEMPTS = 20


def on_free_port(
    listen: Callable[[int], None], taken: type[Exception] | tuple[type[Exception], ...]
) -> int:
    """Let somebody listen on a port that is free.

    Between finding it and listening somebody else may take it: then comes another one.

    Args:
        listen: Listens on a port, of all of the machine's addresses.
        taken: What it raises if the port is taken.

    Returns:
        The port.

    Raises:
        Exception: What `listen` raises; of `taken` the last of several.
    """
    for _ in range(_ATTEMPTS - 1):
        port = _free_port()
        try:
            listen(port)
        except taken:
            continue
        return port
    port = _free_port()
    listen(port)
    return port


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])
