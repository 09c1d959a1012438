"""The options of an elastic job, and what is refused with it."""

from __future__ import annotations

from typing import Any

import pytest

import kerasdist
from kerasdist.errors import ClusterError
from kerasdist.strategies.options import Elasticity, elasticity


@pytest.mark.parametrize(
    ("elastic", "least", "environ", "expected"),
    [
        (None, None, {}, None),
        (False, None, {"KERASDIST_ELASTIC": "1"}, None),
        (None, None, {"KERASDIST_ELASTIC": "0"}, None),
        (None, None, {"KERASDIST_ELASTIC": "1"}, 1),
        (None, None, {"KERASDIST_ELASTIC": "1", "KERASDIST_MIN_WORKERS": "3"}, 3),
        (None, 2, {"KERASDIST_ELASTIC": "1", "KERASDIST_MIN_WORKERS": "3"}, 2),
        (True, None, {}, 1),
        (True, 4, {}, 4),
    ],
)
def test_arguments_and_environment(
    elastic: bool | None, least: int | None, environ: dict[str, str], expected: Any
) -> None:
    found = elasticity(elastic, least, 4, environ)
    assert found == (None if expected is None else Elasticity(expected))


def test_the_platforms_time_is_that_of_the_environment() -> None:
    found = elasticity(True, None, 4, {"KERASDIST_GRACE_SECONDS": "120"})
    assert found == Elasticity(1, 120.0)


@pytest.mark.parametrize(
    ("start", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"KERASDIST_START_WORKERS": "3"}, 3),
        (2, {"KERASDIST_START_WORKERS": "3"}, 2),
        (4, {}, 4),
    ],
)
def test_workers_of_the_start(
    start: int | None, environ: dict[str, str], expected: int | None
) -> None:
    found = elasticity(True, 2, 4, environ, start_workers=start)
    assert found == Elasticity(2, start_workers=expected)


@pytest.mark.parametrize(
    ("elastic", "start", "environ", "error", "text"),
    [
        (True, "2", {}, TypeError, "start_workers='2'"),
        (True, 1, {}, ValueError, "start_workers=1, with min_workers=2 and 4 workers"),
        (True, 5, {}, ValueError, "start_workers=5"),
        (False, 3, {}, ValueError, "start_workers=3 without elastic=True"),
        (True, None, {"KERASDIST_START_WORKERS": "x"}, ClusterError, "'x'"),
    ],
)
def test_bad_numbers_of_the_start(
    elastic: bool, start: Any, environ: dict[str, str], error: Any, text: str
) -> None:
    least = 2 if elastic else None
    with pytest.raises(error, match=text):
        elasticity(elastic, least, 4, environ, start_workers=start)


@pytest.mark.parametrize(
    ("elastic", "least", "environ", "error", "text"),
    [
        ("yes", None, {}, TypeError, "elastic='yes'"),
        (True, True, {}, TypeError, "min_workers=True"),
        (True, 1.0, {}, TypeError, "min_workers=1.0"),
        (True, 0, {}, ValueError, "min_workers=0"),
        (True, 5, {}, ValueError, "min_workers=5, with 4 workers"),
        (False, 2, {}, ValueError, "without elastic=True"),
        (None, 2, {}, ValueError, "without elastic=True"),
        (None, None, {"KERASDIST_ELASTIC": "yes"}, ClusterError, "'yes'"),
        (True, None, {"KERASDIST_MIN_WORKERS": "-1"}, ClusterError, "'-1'"),
        (True, None, {"KERASDIST_GRACE_SECONDS": "0"}, ClusterError, "'0'"),
        (True, None, {"KERASDIST_GRACE_SECONDS": "inf"}, ClusterError, "'inf'"),
        (True, None, {"KERASDIST_GRACE_SECONDS": "1 s"}, ClusterError, "'1 s'"),
    ],
)
def test_bad_options(
    elastic: Any, least: Any, environ: dict[str, str], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        elasticity(elastic, least, 4, environ)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "native"}, "transport='native'"),
        ({"transport": "mpi"}, "transport='mpi'"),
        ({"data": "chief"}, "data='chief'"),
        ({"placement": {}, "devices": ["CPU:0"]}, "a placement"),
    ],
)
def test_what_cannot_change_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kerasdist.RingStrategy(elastic=True, **options)


def test_asynchronous_servers_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"can't be elastic.*with elastic=True"):
        kerasdist.ParameterServerStrategy(mode="async", elastic=True)
    monkeypatch.setenv("KERASDIST_ELASTIC", "1")
    with pytest.raises(ClusterError, match=r"can't be elastic.*KERASDIST_ELASTIC='1'"):
        kerasdist.ParameterServerStrategy(mode="async")
    with pytest.raises(ValueError, match="min_workers=2 without elastic=True"):
        kerasdist.ParameterServerStrategy(mode="async", min_workers=2, elastic=False)


def test_servers_refuse_the_data_of_a_chief_that_may_be_lost() -> None:
    with pytest.raises(ValueError, match="elastic=True with data='chief'"):
        kerasdist.ParameterServerStrategy(elastic=True, data="chief")


def test_several_workers_need_a_server() -> None:
    cluster = {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
        "task": {"type": "worker", "index": 0},
    }
    with pytest.raises(ClusterError, match="--elastic -n 2 --ps 1"):
        kerasdist.ParameterServerStrategy(elastic=True, cluster=cluster)
