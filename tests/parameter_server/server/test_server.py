"""A server on the network: its port, strangers, its end."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest

from groups import in_threads, nothing_stays_open
from kerasdist import errors
from kerasdist.cluster.address import split_address
from kerasdist.parameter_server import ParameterServer, ServerSettings, Variable
from servers import Servers, server_place, worker_place

pytestmark = pytest.mark.timeout(60)
SLOTS = [Variable(name="slots", shape=(4,))]
ZEROS = [np.zeros(4, "float32")]


def test_garbage_on_the_port_disturbs_nobody():
    with nothing_stays_open(), Servers(2) as job:
        stop = threading.Event()

        def shout(_):
            sent = 0
            while not stop.is_set() or sent < 20:
                with socket.create_connection(split_address(job.addresses[0])) as sock:
                    sock.sendall(os.urandom(100))
                sent += 1

        def work(rank):
            client = job.clients[rank]
            table = client.open_table(SLOTS, ZEROS)
            for _ in range(20):
                table.push_pull([np.ones(4, "float32")])
            client.communicator.barrier()
            values = table.pull().values[0].copy()
            stop.set()
            return values

        results = in_threads(3, lambda i: shout(i) if i == 2 else work(i))
        assert all((values == 40).all() for values in results[:2])


def test_addresses_of_other_machines_need_a_secret():
    place = server_place(["10.0.0.1:1"], ["10.0.0.2:1"], 0)
    with nothing_stays_open(), pytest.raises(errors.ClusterError, match="no secret"):
        ParameterServer(place, ServerSettings())
    with pytest.raises(ValueError, match="is a 'ps' task"):
        ParameterServer(worker_place(["a:1"], ["b:1"], 0), ServerSettings())


def test_a_server_can_be_closed_while_it_waits_and_while_it_serves():
    with nothing_stays_open():
        with Servers(1, connected=False) as waiting:
            waiting.servers[0].close()
            waiting.join()
            assert isinstance(waiting.ends[0], errors.TransportClosed)
        with Servers(2) as serving:
            serving.servers[0].close()
            for error in serving.outcomes(lambda c: c.communicator.barrier()):
                assert isinstance(error, errors.ServerLost)
                assert error.index == 0
