"""The rendezvous of launchers, without other hosts."""

from __future__ import annotations

import pytest

from kerasdist.cli.run.nodes import RendezvousError, meeting
from kerasdist.cli.run.options import NodeOptions
from workers import free_ports


@pytest.mark.parametrize(
    ("host", "error", "words"),
    [
        ("127.0.0.1", PermissionError, "a folder"),  # that of the block, unchanged
        ("192.0.2.1", RendezvousError, "rendezvous at 192"),  # isn't an own address
    ],
)
def test_errors(host: str, error: type[Exception], words: str) -> None:
    (port,) = free_ports(1)
    options = NodeOptions(count=1, rank=0, rendezvous=f"{host}:{port}", seconds=10)
    with pytest.raises(error, match=words), meeting(options, 1, 0, b"secret" * 8):
        raise PermissionError("a folder")
