"""The network namespaces that stand for hosts behave like hosts."""

from __future__ import annotations

import subprocess

import pytest

from hosts import Hosts
from pace import bound
from workers import Workers

pytestmark = pytest.mark.netns


def test_a_host_does_not_see_the_loopback_of_another(two_hosts):
    script = """
        import json, os, socket
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if rank == 0:
            socket.create_server(("127.0.0.1", 20000))
        else:
            try:
                socket.create_connection(("127.0.0.1", 20000), timeout=5)
            except ConnectionRefusedError:
                print("RESULT", "true")
    """
    with Workers(
        script, 2, cluster=two_hosts.addresses, prefix=two_hosts.prefix
    ) as job:
        assert job.succeed()[1].result is True


def test_a_cut_host_is_out_of_reach_until_it_is_joined(two_hosts):
    def ping():
        return subprocess.run(
            [
                *two_hosts.prefix(1),
                *("python3", "-c"),
                "import socket, sys; s = socket.socket(); s.settimeout(3)\n"
                f"sys.exit(s.connect_ex(('{two_hosts.address(0)}', 9)))",
            ],
            timeout=bound(30),
            check=False,
        ).returncode

    connection_refused = 111
    assert ping() == connection_refused
    two_hosts.cut(0)
    assert ping() != connection_refused
    two_hosts.join(0)
    assert ping() == connection_refused


def test_everything_is_removed_also_after_a_failure():
    with pytest.raises(ZeroDivisionError), Hosts(3) as hosts:
        assert set(hosts.names) < set(Hosts.leftovers())
        process = subprocess.Popen(
            [*hosts.prefix(2), "sh", "-c", "echo up; exec sleep 1000"],
            stdout=subprocess.PIPE,
        )
        with process.stdout as output:
            assert output.readline() == b"up\n"
        raise ZeroDivisionError

    assert Hosts.leftovers() == []
    assert process.wait(bound(10)) < 0
