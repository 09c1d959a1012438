"""From a cluster to a worker's connection to all servers: what can't be connected."""

from __future__ import annotations

import pytest

from groups import nothing_stays_open
from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.ps import ServerSettings, connect_servers
from kerasdist.transport import Timeouts
from servers import worker_place
from workers import free_ports


def test_wrong_calls():
    settings = ServerSettings()
    several = Cluster(rank=0, size=2, workers=("a:1", "b:1"))
    with pytest.raises(ValueError, match="transport='mpi'; expected one of"):
        connect_servers(Cluster(rank=0, size=1), settings, transport="mpi")
    with pytest.raises(
        errors.ClusterError,
        match=r"2 workers, but no parameter server\. .*`kerasdist run -n 2 --ps 1`",
    ):
        connect_servers(several, settings)
    server = Cluster(
        rank=None, size=1, workers=("a:1",), servers=("b:1",), task_type="ps"
    )
    with pytest.raises(ValueError, match="A server is no worker"):
        connect_servers(server, settings)


def test_a_server_that_never_comes_is_named():
    ports = free_ports(2)
    workers, servers = [f"127.0.0.1:{ports[0]}"], [f"127.0.0.1:{ports[1]}"]
    with (
        nothing_stays_open(),
        pytest.raises(
            errors.StartupError,
            match=rf"^Server 0 \({servers[0]}\) couldn't be reached within 0\.5 s: "
            "connection refused",
        ),
    ):
        connect_servers(
            worker_place(workers, servers, 0),
            ServerSettings(),
            timeouts=Timeouts(startup=0.5),
        )
