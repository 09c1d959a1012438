"""The network namespaces that stand for hosts behave like hosts."""

from __future__ import annotations

import subprocess

import pytest

from hosts import Hosts
from warm import Forked
from workers import Workers

pytestmark = pytest.mark.netns

# Rank 0 sends its own view of itself to rank 1.
TALK = """
    import json, os, socket, time
    config = json.loads(os.environ["TF_CONFIG"])
    rank = config["task"]["index"]
    host, port = config["cluster"]["worker"][0].split(":")
    if rank == 0:
        server = socket.create_server((host, int(port)))
        print("listening", flush=True)
        connection, (peer, _) = server.accept()
        print("RESULT", json.dumps([peer, connection.recv(100).decode()]))
    else:
        deadline = time.monotonic() + 30
        while True:
            try:
                sock = socket.create_connection((host, int(port)), timeout=5)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        sock.sendall(b"hello")
        print("RESULT", json.dumps([sock.getpeername()[0], ""]))
"""


@pytest.mark.parametrize("forked", [False, True])
def test_workers_on_two_hosts_reach_each_other_by_address(two_hosts, forked):
    """Also forks, which enter their host by themselves."""
    script = TALK + "    # tensorflow\n" * forked
    with Workers(
        script, 2, cluster=two_hosts.addresses, prefix=two_hosts.prefix
    ) as job:
        assert isinstance(job.processes[0], Forked) is forked
        results = [worker.result for worker in job.succeed()]

    assert results == [
        [two_hosts.address(1), "hello"],
        [two_hosts.address(0), ""],
    ]


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
            timeout=30,
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
    assert process.wait(10) < 0


def test_two_sets_of_hosts_do_not_collide():
    with Hosts(1) as first, Hosts(1) as second:
        assert not set(first.names) & set(second.names)
        assert first.addresses == second.addresses


def test_the_number_of_hosts_is_checked():
    with pytest.raises(ValueError, match=r"^Expected 1 to 200 hosts\. Received: cou"):
        Hosts(0)
