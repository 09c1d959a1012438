"""From a cluster to a worker's connection to all servers: what can't be connected."""

from __future__ import annotations

import pytest

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.parameter_server import ServerSettings, connect_servers


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
