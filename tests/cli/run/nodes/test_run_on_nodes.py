"""`kerasdist run --nnodes`: a launcher on each of several hosts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from hosts import Hosts
from launching import Launcher, wait_until_said
from pace import bound

_WHY_NOT = Hosts.available()
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(autouse=True)
def _on_their_hosts(hosts: Hosts, launchers: list[Launcher]) -> None:
    for host, launcher in enumerate(launchers):
        launcher.prefix = hosts.prefix(host)


def nodes(hosts: Hosts, count: int, rank: int | None = None) -> list[str]:
    options = ["--nnodes", str(count), "--rendezvous", f"{hosts.address(0)}:29400"]
    return options if rank is None else [*options, "--node-rank", str(rank)]


def ends(jobs: list[Any]) -> list[tuple[int, str, str]]:
    return [
        (job.returncode, *output)
        for job, output in [(job, job.communicate(timeout=bound(90))) for job in jobs]
    ]


SHOW = """
names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
found = [config["cluster"], *map(os.environ.get, names)]
mark(f"{config['task']['type']}-{rank}", json.dumps(found))
print("I am", rank, flush=True)
"""


def test_tasks_of_all_hosts_are_one_job(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    """The first host starts last; hosts may have different numbers of tasks.

    Each divides its own GPUs, and workers have a rank among those of the host.
    """
    jobs = []
    for host, arguments in ((1, ["-n", 2]), (0, ["-n", 1, "--ps", 1])):
        options = (*arguments, *nodes(hosts, 2, host), "script.py")
        launchers[host].env["CUDA_VISIBLE_DEVICES"] = "0,1"
        jobs.append(launchers[host].start(*options, script=SHOW))
    (second, out2, err2), (first, out1, err1) = ends(jobs)
    assert (first, second) == (0, 0), err1 + err2
    assert out1 == "I am 0\n"
    assert out2 == ""
    found = {
        name: json.loads((launchers[host].folder / name).read_text())
        for host, names in ((0, ["worker-0", "ps-0"]), (1, ["worker-1", "worker-2"]))
        for name in names
    }
    cluster = found["worker-0"][0]
    assert found == {
        "worker-0": [cluster, "0", "3", "1", "0,1"],
        "worker-1": [cluster, "0", "3", "2", "0"],
        "worker-2": [cluster, "1", "3", "2", "1"],
        "ps-0": [cluster, None, None, None, "-1"],
    }
    addresses = [hosts.address(host) for host in (0, 1, 1)]
    assert [each.partition(":")[0] for each in cluster["worker"]] == addresses
    assert [each.partition(":")[0] for each in cluster["ps"]] == addresses[:1]


def test_unnamed_hosts_and_a_secret_in_a_file(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    jobs = []
    for host in (2, 1, 0):
        launcher = launchers[host]
        secret = launcher.env.pop("KERASDIST_SECRET")
        (launcher.folder / "secret").write_text(f"{secret}\n")
        jobs.append(
            launcher.start(
                *("--nproc-per-node", 1, "--secret-file", "secret"),
                *(*nodes(hosts, 3), "python", "script.py"),
                script=SHOW,
            )
        )
    assert [code for code, _, _ in ends(jobs)] == [0, 0, 0]
    names = [next(each.folder.glob("worker-*")).name for each in launchers]
    assert names[0] == "worker-0"
    assert sorted(names) == ["worker-0", "worker-1", "worker-2"]


SOON = (
    "from kerasdist.transport.rendezvous import waiting_notice as w; "
    "w.FIRST_SECONDS = w.AGAIN_SECONDS = 0.5"
)
# Host 0 looks only when a host arrives: then the one that it replaces has just left.
SELDOM = f"{SOON}; from kerasdist.cli.run import nodes; nodes.AGAIN_SECONDS = 60.0"


def test_launchers_say_for_whom_they_wait(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    """Before all are here, one is killed and started again: it takes its place."""

    def start(host: int, before: str = SOON) -> subprocess.Popen[str]:
        options = (*("-n", 1, *nodes(hosts, 3, host)), "script.py")
        return launchers[host].start(*options, script=SHOW, before=before)

    killed = start(1)
    line = wait_until_said(killed, "Missing: host 0: ")
    assert line.startswith("kerasdist run: host 1 has been waiting for host 0 (")
    assert "connection refused: nothing listens there." in line
    jobs = [start(0, SELDOM)]
    line = wait_until_said(jobs[0], f"Here: host 0, host 1 ({hosts.address(1)}).")
    assert line.startswith("kerasdist run: host 0 has been waiting for 1 of 3 hosts")
    wait_until_said(killed, "host 0 waits for them")
    killed.kill()
    killed.communicate(timeout=bound(30))
    jobs.append(start(1))
    wait_until_said(jobs[1], "host 0 waits for them")
    jobs.append(start(2))
    assert [code for code, _, _ in ends(jobs)] == [0, 0, 0]
