import pytest

from groups import cluster_on, nothing_stays_open
from kerasdist import errors
from kerasdist.parameter_server import ParameterServer, ServerSettings
from kerasdist.parameter_server.snapshots import path_of
from servers import Servers, server_place


def test_addresses_of_other_machines_need_a_secret():
    place = server_place(["10.0.0.1:1"], ["10.0.0.2:1"], 0)
    with nothing_stays_open(), pytest.raises(errors.ClusterError, match="no secret"):
        ParameterServer(place, ServerSettings())
    with pytest.raises(ValueError, match="is a 'ps' task"):
        ParameterServer(cluster_on(["a:1"], 0, ["b:1"]), ServerSettings())


def test_a_server_can_be_closed_while_it_waits_and_while_it_serves():
    with nothing_stays_open():
        with Servers(1, connected=False) as waiting:
            waiting.servers[0].close()
            waiting.join()
            assert isinstance(waiting.ends[0], errors.TransportClosed)
        with Servers(2, 2) as serving:
            serving.servers[1].close()
            found = serving.outcomes(lambda c: (c.communicator.barrier(), c.stats()))
            serving.join()
            # The other server has nobody left to serve, and blames no worker.
            for error in (*found, serving.ends[0]):
                assert isinstance(error, errors.ServerLost)
                assert (error.index, error.address) == (1, serving.addresses[1])
                assert "It held a part of the weights." in str(error)
                assert "they hold all weights" not in str(error)


def test_what_is_no_snapshot_is_refused(tmp_path):
    path_of(str(tmp_path), 0).write_bytes(b"this is no snapshot")
    with pytest.raises(errors.SnapshotError, match="it begins with b'this is '"):
        Servers(1, connected=False, snapshot_dir=str(tmp_path))
