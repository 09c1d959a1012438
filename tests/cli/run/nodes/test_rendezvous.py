"""The rendezvous of launchers, without other hosts."""

from __future__ import annotations

import pytest

from kerasdist.cli.run.nodes.options import NodeOptions
from kerasdist.cli.run.nodes.rendezvous import RendezvousError, meeting
from workers import free_ports


def test_errors_of_the_block_pass_unchanged() -> None:
    (port,) = free_ports(1)
    options = NodeOptions(count=1, rank=0, rendezvous=f"127.0.0.1:{port}", seconds=10)
    with (
        pytest.raises(PermissionError, match="a folder"),
        meeting(options, 1, 0, b"secret" * 8),
    ):
        raise PermissionError("a folder")


def test_an_address_of_another_host() -> None:
    options = NodeOptions(count=1, rank=0, rendezvous="192.0.2.1:29400", seconds=10)
    with (
        pytest.raises(RendezvousError, match="rendezvous at 192"),
        meeting(options, 1, 0, b"secret" * 8),
    ):
        pass
