import re

import pytest

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.parameter_server import ServerSettings, connect_servers


def test_defaults_and_what_is_agreed_on():
    settings = ServerSettings()
    assert settings.agreed() == {
        "mode": "sync",
        "max_staleness": None,
        "snapshots": False,
    }
    assert not settings.restartable
    assert ServerSettings(mode="async", snapshot_dir="a").restartable
    assert not ServerSettings(mode="async").restartable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"restart_timeout": None}, "restart_timeout=None; expected"),
        ({"snapshot_updates": 0}, "snapshot_updates=0; expected a number >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ServerSettings(**arguments)


def test_all_faults_are_reported_at_once():
    with pytest.raises(ValueError, match=r"mode='x'.*snapshot_updates=-1"):
        ServerSettings(mode="x", snapshot_updates=-1)


def test_wrong_calls_of_a_client():
    settings = ServerSettings()
    several = Cluster(rank=0, size=2, workers=("a:1", "b:1"))
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
