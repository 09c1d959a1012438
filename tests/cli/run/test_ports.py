"""Ports that the launcher keeps for tasks that have ended."""

from __future__ import annotations

import contextlib
import socket

import pytest

from kerasdist.cli.run.job_spec import JobSpec
from kerasdist.cli.run.options import ElasticOptions
from kerasdist.cli.run.spawn import JobPorts

# Lost workers of such a job are started again at their ports.
ELASTIC = ElasticOptions(min_workers=1, restarts=1, grace=1.0, size=2, max_workers=2)


def ports_of(undo, *, keep):
    job = JobSpec(
        **{"size": 2, "servers": 1, "command": (), "environ": {}},
        **{"log_dir": None, "tagged": False, "cores": ()},
        elastic=ELASTIC if keep else None,
    )
    ports = JobPorts(job)
    undo.callback(ports.close)
    return ports, job.tasks


@pytest.fixture
def undo():
    with contextlib.ExitStack() as stack:
        yield stack


def connects(address):
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("keep", [False, True])
def test_each_task_has_a_port_that_listens_inside_the_block(undo, keep):
    """A kept one is given to no other process."""
    ports, tasks = ports_of(undo, keep=keep)
    with ports.listen() as sockets:
        addresses = [ports.address(task) for task in tasks]
        assert ports.cluster == {"worker": addresses[:2], "ps": addresses[2:]}
        named = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        assert named == addresses
        assert all(map(connects, addresses))
    assert not any(map(connects, addresses))
    for address in addresses:
        with socket.socket() as other:
            used = pytest.raises(OSError, match=r"Address already in use")
            with used if keep else contextlib.nullcontext():
                other.bind(("127.0.0.1", int(address.split(":")[1])))


def test_a_task_listens_again_at_its_port_though_connections_linger(undo):
    ports, (task, *_) = ports_of(undo, keep=True)
    with ports.listen() as (server, *_):
        with socket.create_connection(server.getsockname()):
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first has the lingering one
        with (
            pytest.raises(OSError, match=r"Address already in use"),
            ports.listen_again(task),
        ):
            pass
    for _ in range(2):
        with ports.listen_again(task):
            assert connects(ports.address(task))
        assert not connects(ports.address(task))
