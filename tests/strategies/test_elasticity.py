import pytest

import kerasdist
from kerasdist.errors import ClusterError
from kerasdist.strategies.options import Elasticity, elasticity

ELASTIC = {"KERASDIST_ELASTIC": "1"}
LEAST = {**ELASTIC, "KERASDIST_MIN_WORKERS": "3"}
GRACE = "KERASDIST_GRACE_SECONDS"
START = "KERASDIST_START_WORKERS"


@pytest.mark.parametrize(
    ("elastic", "least", "start", "environ", "expected"),
    [
        (None, None, None, {}, None),
        (False, None, None, ELASTIC, None),
        (None, None, None, {"KERASDIST_ELASTIC": "0"}, None),
        (None, None, None, ELASTIC, Elasticity(1)),
        (None, None, None, LEAST, Elasticity(3)),
        (None, 2, None, LEAST, Elasticity(2)),
        (True, 4, None, {}, Elasticity(4)),
        (True, None, None, {GRACE: "120"}, Elasticity(1, 120.0)),
        (True, 2, None, {START: "3"}, Elasticity(2, start_workers=3)),
        (True, 2, 2, {START: "3"}, Elasticity(2, start_workers=2)),
    ],
)
def test_arguments_and_environment(elastic, least, start, environ, expected):
    assert elasticity(elastic, least, 4, environ, start_workers=start) == expected


@pytest.mark.parametrize(
    ("elastic", "least", "start", "environ", "error", "text"),
    [
        ("yes", None, None, {}, TypeError, "elastic='yes'"),
        (True, True, None, {}, TypeError, "min_workers=True"),
        (True, 1.0, None, {}, TypeError, "min_workers=1.0"),
        (True, 0, None, {}, ValueError, "min_workers=0"),
        (True, 5, None, {}, ValueError, "min_workers=5, with 4 workers"),
        (False, 2, None, {}, ValueError, "without elastic=True"),
        (None, 2, None, {}, ValueError, "without elastic=True"),
        (None, None, None, {"KERASDIST_ELASTIC": "yes"}, ClusterError, "'yes'"),
        (True, None, None, {"KERASDIST_MIN_WORKERS": "-1"}, ClusterError, "'-1'"),
        (True, None, None, {GRACE: "0"}, ClusterError, "'0'"),
        (True, None, None, {GRACE: "inf"}, ClusterError, "'inf'"),
        (True, None, None, {GRACE: "1 s"}, ClusterError, "'1 s'"),
        (True, 2, "2", {}, TypeError, "start_workers='2'"),
        (True, 2, 1, {}, ValueError, "=1, with min_workers=2 and 4 workers"),
        (True, 2, 5, {}, ValueError, "start_workers=5"),
        (False, None, 3, {}, ValueError, "start_workers=3 without elastic=True"),
        (True, 2, None, {START: "x"}, ClusterError, "'x'"),
    ],
)
def test_bad_options(elastic, least, start, environ, error, text):
    with pytest.raises(error, match=text):
        elasticity(elastic, least, 4, environ, start_workers=start)


RING, SERVERS = kerasdist.RingStrategy, kerasdist.ParameterServerStrategy
TWO = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 0},
}


@pytest.mark.parametrize(
    ("create", "options", "error", "text"),
    [
        (RING, {"transport": "native"}, ValueError, "transport='native'"),
        (RING, {"transport": "mpi"}, ValueError, "transport='mpi'"),
        (RING, {"data": "chief"}, ValueError, "data='chief'"),
        (RING, {"placement": {}, "devices": ["CPU:0"]}, ValueError, "a placement"),
        (SERVERS, {"mode": "async"}, ClusterError, "can't be .*with elastic=True"),
        # The data of a chief that may be lost.
        (SERVERS, {"data": "chief"}, ValueError, "elastic=True with data='chief'"),
        # Several workers need a server.
        (SERVERS, {"cluster": TWO}, ClusterError, "--elastic -n 2 --ps 1"),
    ],
)
def test_what_cannot_change_is_refused(create, options, error, text):
    with pytest.raises(error, match=text):
        create(elastic=True, **options)


def test_asynchronous_servers_refuse_it(monkeypatch):
    monkeypatch.setenv("KERASDIST_ELASTIC", "1")
    with pytest.raises(ClusterError, match=r"can't be elastic.*KERASDIST_ELASTIC='1'"):
        SERVERS(mode="async")
    with pytest.raises(ValueError, match="min_workers=2 without elastic=True"):
        SERVERS(mode="async", min_workers=2, elastic=False)
