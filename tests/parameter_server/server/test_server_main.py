"""A parameter server as a process: what it logs."""

from __future__ import annotations

import threading

import numpy as np

from kerasdist.parameter_server import ServerSettings, Variable, connect_servers
from kerasdist.parameter_server.server.server import run_server
from pace import bound
from servers import SECONDS, server_place, worker_place
from waiting import wait_until
from workers import free_ports


def test_it_says_at_the_start_what_it_holds(said):
    worker, *servers = (f"127.0.0.1:{port}" for port in free_ports(3))
    settings = ServerSettings(mode="async")
    threads = [
        threading.Thread(
            target=run_server,
            args=(server_place([worker], servers, index), settings, SECONDS),
        )
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    variables = [
        Variable(name="large", shape=(1000, 3), sparse=True),
        Variable(name="small", shape=(1500,)),
    ]
    place = worker_place([worker], servers, 0)
    with connect_servers(place, settings, timeouts=SECONDS) as client:
        table = client.open_table(
            variables, [np.zeros(v.shape, "f4") for v in variables]
        )
        wait_until(lambda: len(said()) == 4, "what both hold")
        begin = said()
        for _ in range(3):
            table.push_pull([np.ones((1000, 3), "f4"), np.ones(1500, "f4")])
    for thread in threads:
        thread.join(bound(20))
    names = [f"kerasdist: server {i} of 2 ({servers[i]})" for i in range(2)]
    for name in names:
        assert f"{name} serves 1 worker(s), mode='async'." in begin
    share = "{} bytes in {}, {} % of 18,000 bytes; variables: 2."
    held = [line for line in begin if " holds " in line]
    assert sorted(held) == [
        f"{names[0]} holds {share.format('12,000', '2 pieces', '66.7')}",
        f"{names[1]} holds {share.format('6,000', '1 piece', '33.3')}",
    ]
    ends = sorted(said()[4:])
    assert all(end.startswith(name) for end, name in zip(ends, names, strict=True))
    # One for the table, and one for each step, however many variables there are.
    assert all(" has finished: 4 requests, " in end for end in ends)
    last = "; staleness of 3 reads: 0.00 steps in the mean, 0 at most."
    assert all(end.endswith(last) for end in ends)
