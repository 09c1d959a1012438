"""Predictions against schedules played event by event, and against closed forms."""

import dataclasses
import math
import subprocess

import pytest

from kerasdist.collectives.ring import (
    PIECE_BYTES,
    all_gather_steps,
    reduce_scatter_steps,
    sends_whole,
)
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.prediction import simulation
from kerasdist.prediction.profile import (
    LOOPBACK,
    GradientMessage,
    HostLink,
    Profile,
    all_reduces_of,
    parse_link,
)
from kerasdist.prediction.simulation import Setup, predict
from kerasdist.transport.framing import from_plain, to_object
from pace import bound
from workers import Workers

LINK = HostLink(1e-4, 1e-8)


def played(size, ranks, arrivals):
    """When each rank has the sum: every exchange of every rank, one by one."""
    clocks = list(arrivals)

    def exchange(bytes_of):
        sent = list(clocks)
        for rank in range(ranks):
            left = (rank - 1) % ranks
            start = max(sent[rank], sent[left])
            clocks[rank] = start + LINK.seconds(bytes_of(left))

    if sends_whole(size, ranks):
        for _ in range(ranks - 1):
            exchange(lambda rank: size)
        return clocks
    for steps in (reduce_scatter_steps, lambda r, n: all_gather_steps(r, n, 1)):
        for sending in zip(*(steps(rank, ranks) for rank in range(ranks)), strict=True):
            chunks = [equal_part(size, ranks, send) for send, _ in sending]
            longest = equal_part(size, ranks, 0).stop
            for start in range(0, longest, PIECE_BYTES):
                ends = [min(c.start + start + PIECE_BYTES, c.stop) for c in chunks]
                exchange(
                    lambda rank, start=start, ends=ends, chunks=chunks: max(
                        ends[rank] - chunks[rank].start - start, 0
                    )
                )
    return clocks


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("size", [4, 12_000, 60_000, 1_000_000, 9_000_001])
def test_a_ring_takes_what_its_exchanges_take(ranks, size):
    taken = simulation.all_reduce(size, ranks, Setup(link=LINK))
    assert max(played(size, ranks, [0.0] * ranks)) == pytest.approx(taken, rel=1e-3)
    # All wait for the last one.
    late = [0.0] * ranks
    late[ranks // 2] = 5.0
    assert min(played(size, ranks, late)) == pytest.approx(5 + taken, rel=1e-3)


def test_a_gather_and_hosts_with_several_workers():
    apart, full = (Setup(link=LINK, per_host=count) for count in (1, 4))
    assert simulation.all_gather(1000, 5, apart) == 4 * LINK.seconds(1000)
    inside = simulation.all_reduce(10**6, 4, full)
    assert inside == 2 * LOOPBACK.latency + 10**6 * LOOPBACK.byte
    between = simulation.all_reduce(10**6, 3, apart)
    assert simulation.all_reduce(10**6, 12, full) == pytest.approx(2 * inside + between)
    assert simulation.all_gather(8, 4, full) < 4 * LOOPBACK.latency


def profile(**given):
    gradients = all_reduces_of([500_000, 500_000])
    values = {"rows": 10.0, "compute": (0.3,), "messages": gradients, "weights": 10**6}
    return Profile(**values | given)


def test_a_step_by_hand():
    """Half of the bytes are ready after 2/3 of computing, the others at its end."""
    found = predict(profile(update=0.02, input=0.01), Setup(link=LINK), 2)
    each = simulation.all_reduce(500_000, 2, Setup(link=LINK))
    assert each < 0.1  # so the first message and its update are hidden
    assert found.step_s == pytest.approx(0.3 + each + 0.01 + 0.01)
    assert found.efficiency == pytest.approx(0.33 / found.step_s)
    assert found.examples_per_s == pytest.approx(20 / found.step_s)
    assert found.low < found.step_s < found.high


def test_all_wait_for_the_slowest():
    noisy = profile(compute=(1.0, 3.0), messages=())
    for workers in (1, 2, 5):
        mean = 3 - 2 * 0.5**workers
        found = predict(noisy, Setup(link=LINK), workers)
        assert found.step_s == pytest.approx(mean, rel=0.01)
    assert found.limit == "stragglers"
    # The means of several steps differ less.
    averaged = predict(noisy, Setup(link=LINK, local_steps=16), 5)
    assert 2 < averaged.step_s < found.step_s - 0.3


def test_local_steps_average_weights_now_and_then():
    found = predict(profile(), Setup(link=LINK, local_steps=10), 4)
    average = simulation.all_reduce(10**6, 4, Setup(link=LINK))
    assert found.step_s == pytest.approx(0.3 + average / 10)


def test_servers_are_shared():
    slow = Setup(link=LINK, strategy="sync", servers=2)
    # 8 workers send 4 times their bytes to each of two servers, and receive them.
    found = predict(profile(), slow, 8)
    assert found.step_s == pytest.approx(0.3 + 2 * LINK.seconds(2_000_000), rel=0.02)
    # Workers that don't wait: as fast as alone if they are few, as the servers if many.
    free = dataclasses.replace(slow, strategy="async")
    few, many = (predict(profile(), free, workers) for workers in (2, 27_360))
    assert few.efficiency > 0.9
    seconds_of_a_step = 2 * LINK.byte * 1_000_000 / 2
    assert many.examples_per_s == pytest.approx(10 / seconds_of_a_step, rel=0.05)
    assert many.limit == "servers"


@pytest.mark.parametrize(
    ("changed", "link", "workers", "limit"),
    [
        ({}, HostLink(1e-6, 1e-11), 8, "compute"),
        ({"input": 0.2}, HostLink(1e-6, 1e-11), 8, "input"),
        ({}, HostLink(1e-6, 1e-6), 8, "bandwidth"),
        ({}, HostLink(1e-2, 1e-11), 8, "latency"),
        ({"compute": (0.1, 0.1, 0.9)}, HostLink(1e-6, 1e-11), 8, "stragglers"),
        ({}, HostLink(1e-6, 1e-11), 27_360, "control plane"),
    ],
)
def test_the_limit_is_what_costs_most(changed, link, workers, limit):
    assert predict(profile(**changed), Setup(link=link), workers).limit == limit


# Variables in millions of numbers, from the first layer to the last. Images per second
# of one P100 (the benchmarks of TensorFlow, batches of 64; ResNet-101: between those of
# ResNet-50 and ResNet-152).
_BLOCKS = [(64, 256, 3), (128, 512, 4), (256, 1024, 23), (512, 2048, 3)]
CHART = {
    "VGG-16": (
        [
            *(9 * a * b / 1e6 for a, b in [(3, 64), (64, 64), (64, 128), (128, 128)]),
            *(9 * a * b / 1e6 for a, b in [(128, 256), (256, 256), (256, 256)]),
            *(9 * a * b / 1e6 for a, b in [(256, 512), *[(512, 512)] * 5]),
            *(102.8, 16.8, 4.1),
        ],
        154,
    ),
    "ResNet-101": (
        [
            number / 1e6
            for inner, outer, count in _BLOCKS
            for number in (inner * outer, 9 * inner * inner, inner * outer) * count
        ],
        130,
    ),
    "Inception V3": ([23.8 / 95] * 95, 142),
}


def test_the_order_of_a_published_chart_comes_out_of_layer_sizes():
    """Horovod's chart: 512 GPUs, 25 Gbit/s: about 90, 90 and 68 % (Sergeev, 2018)."""
    setup = Setup(link=parse_link("25G,20us"), per_host=4)
    found = {}
    for name, (sizes, speed) in CHART.items():
        buckets: list[list[int]] = [[]]
        for size in reversed(sizes):
            if sum(buckets[-1]) > 25_000_000:
                buckets.append([])
            buckets[-1].append(int(4e6 * size))
        step = Profile(
            rows=64,
            compute=(64 / speed,),
            messages=all_reduces_of([sum(b) for b in buckets]),
        )
        found[name] = predict(step, setup, 512).efficiency
    assert found["VGG-16"] < 0.8 < 0.85 < found["ResNet-101"] <= found["Inception V3"]
    assert found["VGG-16"] > 0.45


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10G", HostLink(100e-6, 8 / 9.5e9)),
        ("100 Mbit/s", HostLink(100e-6, 8 / 9.5e7)),
        ("1G,2ms", HostLink(2e-3, 8 / 9.5e8)),
        ("25gbps / 80us", HostLink(80e-6, 8 / 23.75e9)),
        ("loopback", LOOPBACK),
    ],
)
def test_networks_have_names(text, link):
    assert parse_link(text) == pytest.approx(link)


@pytest.mark.parametrize("text", ["", "fast", "0G", "10", "10G,", "-1G", "1G,2s"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"Received: .*expected for instance '10G'"):
        parse_link(text)


def test_profiles_are_json():
    given = profile(link=LINK, messages=(GradientMessage("all_gather", 5, 0.5),))
    assert from_plain(to_object(given), Profile) == given
    for wrong in ({"rows": 1}, {"rows": 0.0, "compute": []}, [], {"rows": math.nan}):
        with pytest.raises((TypeError, ValueError)):
            from_plain(wrong, Profile)
    with pytest.raises(ValueError, match="Numbers must be positive"):
        predict(given, Setup(link=LINK, servers=0), 3)


MEASURED = """
import json
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from kerasdist.prediction.profile import measure_link

job = connect(resolve())
print("RESULT", json.dumps(measure_link(job.communicator)))
job.close()
"""


@pytest.mark.netns
def test_a_link_between_hosts_is_measured(two_hosts):
    """100 Mbit/s are 80 ns for each byte, and more with the headers of TCP."""
    for host in range(2):
        shape = "tc qdisc add dev eth0 root tbf rate 100mbit burst 20000 latency 1000ms"
        command = [*two_hosts.prefix(host), *shape.split()]
        subprocess.run(command, check=True, timeout=bound(30))
    hosts = {"cluster": two_hosts.addresses, "prefix": two_hosts.prefix}
    (latency, byte), _ = Workers(MEASURED, 2, **hosts).results()
    assert 78e-9 < byte < bound(60e-9)
    assert 0 < latency < bound(0.05)
