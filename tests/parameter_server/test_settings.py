"""Settings: all faults at once, and what tasks compare."""

from __future__ import annotations

import re

import pytest

from kerasdist.parameter_server import ServerSettings


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
        ({"mode": "fast"}, "mode='fast'; expected one of ('sync', 'async')"),
        ({"mode": "async", "max_staleness": -1}, "max_staleness=-1; expected"),
        ({"mode": "async", "max_staleness": True}, "max_staleness=True; expected"),
        ({"max_staleness": 2}, "max_staleness=2 with mode='sync'"),
        ({"snapshot_dir": "a"}, "snapshot_dir='a' with mode='sync'"),
        ({"snapshot_seconds": 0}, "snapshot_seconds=0; expected seconds above 0"),
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
