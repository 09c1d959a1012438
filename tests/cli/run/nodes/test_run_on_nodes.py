"""`kerasdist run --nnodes`: a launcher on each of several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Hosts
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.dial import dial_tcp, retry
from launching import Launcher, launcher_in
from pace import bound
from waiting import wait_until
from workers import free_ports

_WHY_NOT = Hosts.available()
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]
SECRET = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture
def launchers(hosts: Hosts, tmp_path: Path) -> Iterator[list[Launcher]]:
    with contextlib.ExitStack() as undo:
        made = []
        for host in range(3):
            folder = tmp_path / str(host)
            folder.mkdir()
            launcher = undo.enter_context(launcher_in(folder))
            launcher.prefix = hosts.prefix(host)
            launcher.env["KERASDIST_SECRET"] = SECRET
            made.append(launcher)
        yield made


def nodes(hosts: Hosts, count: int, rank: int | None = None) -> list[str]:
    """Return the options of one launcher."""
    options = ["--nnodes", str(count), "--rendezvous", f"{hosts.address(0)}:29400"]
    return options if rank is None else [*options, "--node-rank", str(rank)]


def ends(jobs: list[Any]) -> list[tuple[int, str, str]]:
    return [
        (job.returncode, *output)
        for job, output in [(job, job.communicate(timeout=bound(90))) for job in jobs]
    ]


SHOW = """
tasks = [f"{config['task']['type']} {rank}", config["cluster"]]
mark(f"{config['task']['type']}-{rank}", json.dumps(tasks))
print("I am", rank, flush=True)
"""


def test_tasks_of_all_hosts_are_one_job(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    """The first host starts last; hosts may have different numbers of tasks."""
    jobs = []
    for host, arguments in ((1, ["-n", 2]), (0, ["-n", 1, "--ps", 1])):
        options = (*arguments, *nodes(hosts, 2, host), "script.py")
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
    cluster = found["worker-0"][1]
    assert all(each[1] == cluster for each in found.values())
    addresses = [hosts.address(host) for host in (0, 1, 1)]
    assert [each.partition(":")[0] for each in cluster["worker"]] == addresses
    assert [each.partition(":")[0] for each in cluster["ps"]] == addresses[:1]


def test_unnamed_hosts_and_a_secret_in_a_file(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    jobs = []
    for host in (2, 1, 0):
        launcher = launchers[host]
        del launcher.env["KERASDIST_SECRET"]
        (launcher.folder / "secret").write_text(f"{SECRET}\n")
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


@pytest.mark.parametrize(
    ("given", "seconds", "words"),
    [
        ([(2, 0), (3, 1)], 60, "with --nnodes 3"),
        ([(2, 0), (2, 0)], 60, "29400"),
        ([(2, 0), (2, 1)], 60, "isn't the launcher of this job"),  # another secret
        ([(2, 0)], 1, "1 of 2 hosts are here, after 1 s (--start-timeout)"),
        ([(2, 1)], 1, "host 0 isn't at "),
    ],
)
def test_launchers_that_do_not_fit(
    hosts: Hosts,
    launchers: list[Launcher],
    given: list[tuple[int, int]],
    seconds: int,
    words: str,
) -> None:
    if "launcher" in words:
        launchers[1].env["KERASDIST_SECRET"] = "f" * 32
    jobs = [
        launcher.start(
            *("-n", 1, *nodes(hosts, *each), "--start-timeout", seconds, "script.py"),
            script='mark("started")',
        )
        for launcher, each in zip(launchers, given, strict=False)
    ]
    wait_until(lambda: any(job.poll() is not None for job in jobs), "an error")
    waiting = [job for job in jobs if job.poll() is None]
    for job in waiting:
        job.send_signal(signal.SIGINT)
    found = ends(jobs)
    assert any(code == 1 and words in err for code, _, err in found), found
    assert not [*launchers[0].folder.glob("started"), *launchers[1].folder.glob("st*")]


def test_odd_addresses_of_another_host_are_refused(tmp_path: Path) -> None:
    """Its launcher holds the secret; but they go into the TF_CONFIG of all tasks."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with launcher_in(tmp_path) as launcher:
        launcher.env["KERASDIST_SECRET"] = SECRET
        options = ("--nnodes", 2, "--rendezvous", address, "--node-rank", 0)
        job = launcher.start("-n", 1, *options, "script.py", script=SHOW)
        twice = ["h:1", "h:1"]
        for worker in (5, None, "h", "h:\x1b[31m1", ["h:1"], "h:99999", *twice):
            tasks = {"worker": twice if worker == "h:1" else [worker], "ps": []}
            hello = {"session": "kerasdist run", "purpose": "node", "rank": 1}
            hello |= {"count": 2, "tasks": tasks}
            deadline = Deadline(bound(60))
            connection = retry(
                lambda: dial_tcp(address, SECRET.encode(), hello, deadline),  # noqa: B023
                *(deadline, 1, address, threading.Event()),
            )
            with connection:
                _, reply = connection.read_json(deadline)
            assert "an address" in reply["fault"], worker
        unnamed = launcher.run("-n", 1, *options[:4], "script.py", script=SHOW)
        assert unnamed[0] == 1
        assert "give each its --node-rank" in unnamed[2]
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=bound(60))
        assert "\x1b" not in errors
        assert not [*tmp_path.glob("worker-*")]


SOON = (
    "from kerasdist.transport.rendezvous import waiting_notice as w; "
    "w.FIRST_SECONDS = w.AGAIN_SECONDS = 0.5"
)
# Host 0 looks only when a host arrives: then the one that it replaces has just left.
SELDOM = f"{SOON}; from kerasdist.cli.run import nodes; nodes.AGAIN_SECONDS = 60.0"


def test_launchers_say_for_whom_they_wait(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    """Host 2 comes when the others have said that it is missing.

    Before, the launcher of host 1 is killed, and started again: it takes its place.
    """
    jobs: dict[int, subprocess.Popen[str]] = {}
    lines: dict[int, str] = {}

    def started(host: int, expected: str, before: str = SOON) -> None:
        """Start a launcher, and read its lines up to an expected one."""
        options = nodes(hosts, 3, host)
        jobs[host] = launchers[host].start(
            *("-n", 1, *options, "script.py"), script=SHOW, before=before
        )
        lines[host] = ""
        while expected not in lines[host]:
            lines[host] = jobs[host].stderr.readline()
            assert lines[host], "it has ended"

    started(1, "Missing: host 0: ")
    alone = lines[1]
    started(0, "Here: host 0, host 1 (", SELDOM)
    while "host 0 waits for them" not in lines[1]:
        lines[1] = jobs[1].stderr.readline()
        assert lines[1], "it has ended"
    jobs[1].kill()
    jobs[1].communicate(timeout=bound(30))
    started(1, "host 0 waits for them")
    jobs[2] = launchers[2].start(
        *("-n", 1, *nodes(hosts, 3, 2), "script.py"), script=SHOW
    )
    assert [code for code, _, _ in ends(list(jobs.values()))] == [0, 0, 0]
    assert alone.startswith("kerasdist run: host 1 has been waiting for host 0 (")
    assert "connection refused: nothing listens there." in alone
    assert "s (--start-timeout)." in alone
    assert lines[0].startswith(
        "kerasdist run: host 0 has been waiting for 1 of 3 hosts"
    )
    assert f"Here: host 0, host 1 ({hosts.address(1)})." in lines[0]


TRAIN = """
import keras, numpy as np
import kerasdist

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with kerasdist.RingStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark(f"up-{rank}", os.getpid())
        time.sleep(0.05)

model.fit(x, x[:, :1], epochs=100, verbose=2, callbacks=[Pace()])
"""


@pytest.mark.soak
@pytest.mark.parametrize("elastic", [False, True])
def test_a_worker_is_lost(
    hosts: Hosts, launchers: list[Launcher], elastic: bool
) -> None:
    """Both launchers end; an elastic job continues on the other host."""
    options = ["--elastic"] if elastic else []
    jobs = [
        launchers[host].start(
            *("-n", 1, *options, *nodes(hosts, 2, host), "script.py"), script=TRAIN
        )
        for host in (0, 1)
    ]
    (pid,) = launchers[1].pids("up-1")
    os.kill(pid, signal.SIGKILL)
    found = ends(jobs)
    assert found[1][0] == 137, found[1]
    assert (found[0][0] == 0) == elastic, found[0]
