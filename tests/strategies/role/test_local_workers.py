import socket

import pytest

from kerasdist.cluster.address import is_this_host
from kerasdist.strategies.cluster_resolver import local_ranks


@pytest.mark.parametrize(
    ("addresses", "rank", "expected"),
    [
        # `kerasdist run`, and one worker without settings.
        (["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], 1, [0, 1, 2]),
        (["this worker"], 0, [0]),
        # Two hosts, in blocks and in turn; reserved addresses, of no host.
        (["240.0.0.1:1", "240.0.0.1:2", "240.0.0.2:1", "240.0.0.2:2"], 2, [2, 3]),
        (["240.0.0.1:1", "240.0.0.2:1", "240.0.0.1:2", "240.0.0.2:2"], 2, [0, 2]),
        (["[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::1]:2"], 0, [0, 2]),
        # One host by several names.
        (["localhost:1", "127.0.0.1:2", "240.0.0.1:1", "127.0.0.2:3"], 0, [0, 1, 3]),
        ([f"{socket.gethostname()}:1", "127.0.0.1:2"], 1, [0, 1]),
        (["A.invalid:1", "a.invalid.:2", "b.invalid:1"], 1, [0, 1]),
        # MPI's processes have no ports.
        (["a.invalid, pid 7", "b.invalid, pid 7", "b.invalid, pid 8"], 2, [1, 2]),
    ],
)
def test_local_ranks(addresses, rank, expected):
    assert local_ranks(addresses, rank) == expected


def test_all_workers_of_a_host_agree():
    addresses = ["240.0.0.1:1", "localhost:1", "240.0.0.2:1", "127.0.0.1:2"]
    assert local_ranks(addresses, 1) == local_ranks(addresses, 3) == [1, 3]


def test_the_addresses_of_this_host():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert not is_this_host("240.0.0.1")
    assert not is_this_host("no-such-host.invalid")
    assert not is_this_host("a" * 70)  # no name at all
    # The address that other hosts see, if there is a route to any.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))
        except OSError:
            return
        assert is_this_host(sock.getsockname()[0])
