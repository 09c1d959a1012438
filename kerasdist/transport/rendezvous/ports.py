"""Free ports for servers that need the number before they listen."""

from __future__ import annotations

import socket
from collections.abc import Callable

_ATTEMPTS = 20


def on_free_port(
    listen: Callable[[int], None], taken: type[Exception] | tuple[type[Exception], ...]
) -> int:
    """Make a server listen on a free port.

    Another process may take the port before the server listens: then another port is
    tried.

    Args:
        listen: Listens on a port, of all of the machine's addresses.
        taken: The exceptions that it raises if the port is taken.

    Returns:
        The port.

    Raises:
        Exception: Any that `listen` raises; of `taken` the last of several.
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
