"""Who is let in by a server, and who isn't."""

from __future__ import annotations

import re

import pytest

from groups import nothing_stays_open, outcomes
from kerasdist import errors
from kerasdist.server import ServerSettings
from kerasdist.transport import Timeouts
from servers import Servers

pytestmark = pytest.mark.timeout(60)


def test_another_secret_is_refused(monkeypatch):
    monkeypatch.setenv("KERASDIST_SECRET", "one")
    with nothing_stays_open():
        timeouts = Timeouts(startup=2, collective=5, heartbeat=5)
        with Servers(1, connected=False, timeouts=timeouts) as job:
            monkeypatch.setenv("KERASDIST_SECRET", "another")
            with pytest.raises(errors.AuthenticationError, match="KERASDIST_SECRET"):
                job.connect(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ServerSettings(mode="sync"), "'mode': 'sync'.*here.*'mode': 'async'"),
        (
            ServerSettings(mode="async", max_staleness=3),
            "'max_staleness': 3.*here.*'max_staleness': None",
        ),
    ],
)
def test_a_worker_that_was_asked_for_something_else_is_refused(settings, message):
    with nothing_stays_open(), Servers(2, connected=False) as job:

        def connect(rank):
            if rank:
                return job.connect(rank, settings=settings)
            return job.connect(rank)

        # At once, and not when the time is over: waiting wouldn't help.
        first, second = outcomes(2, connect, 10.0)
        job.join(10.0)
        for error in (first, second, job.ends[0]):
            assert isinstance(error, errors.StartupError)
            assert re.search(message, str(error))
            assert "Give all tasks the same arguments" in str(error)


def test_servers_in_another_order_are_refused():
    """Two tasks whose clusters name the same servers in another order."""
    timeouts = Timeouts(startup=3.0, collective=5, heartbeat=5)
    with (
        nothing_stays_open(),
        Servers(1, 2, connected=False, timeouts=timeouts) as job,
    ):
        job.addresses.reverse()
        with pytest.raises(errors.StartupError, match="This is server 1 of the job"):
            job.connect(0)
