"""`kerasdist run --nnodes`: a launcher on each of several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Hosts
from launching import HANG, Launcher, launcher_in

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
    ranked = [] if rank is None else ["--node-rank", str(rank)]
    return [
        "--nnodes",
        str(count),
        "--rendezvous",
        f"{hosts.address(0)}:29400",
        *ranked,
    ]


def ends(jobs: list[Any]) -> list[tuple[int, str, str]]:
    return [
        (job.returncode, *output)
        for job, output in [(job, job.communicate(timeout=90)) for job in jobs]
    ]


SHOW = """
tasks = [f"{config['task']['type']} {rank}", config["cluster"]]
mark(f"{config['task']['type']}-{rank}", json.dumps(tasks))
print("I am", rank, flush=True)
"""


@pytest.mark.parametrize("ranked", [True, False])
def test_tasks_of_all_hosts_are_one_job(
    hosts: Hosts, launchers: list[Launcher], ranked: bool
) -> None:
    """The first host starts last; hosts may have different numbers of tasks."""
    jobs = []
    for host, arguments in ((1, ["-n", 2]), (0, ["-n", 1, "--ps", 1])):
        options = nodes(hosts, 2, host if ranked else None)
        jobs.append(
            launchers[host].start(*arguments, *options, "script.py", script=SHOW)
        )
        time.sleep(0.5)
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
    ("first", "second", "words"),
    [
        ((2, 0), (3, 1), "with --nnodes 3"),
        ((2, 0), (2, 0), "29400"),
        ((2, 0), None, "1 of 2 hosts are here, after 2 s (--start-timeout)"),
        (None, (2, 1), "host 0 isn't at "),
    ],
)
def test_launchers_that_do_not_fit(
    hosts: Hosts,
    launchers: list[Launcher],
    first: tuple[int, int] | None,
    second: tuple[int, int] | None,
    words: str,
) -> None:
    jobs = [
        launcher.start(
            *("-n", 1, *nodes(hosts, *given), "--start-timeout", 2, "script.py"),
            script='mark("started")',
        )
        for launcher, given in zip(launchers, (first, second), strict=False)
        if given is not None
    ]
    found = ends(jobs)
    assert [code for code, _, _ in found] == [1] * len(jobs)
    assert any(words in err for _, _, err in found), found
    assert not list(launchers[0].folder.glob("started"))


def test_another_secret_is_refused(hosts: Hosts, launchers: list[Launcher]) -> None:
    launchers[1].env["KERASDIST_SECRET"] = "f" * 32
    jobs = [
        launchers[host].start(
            *("-n", 1, *nodes(hosts, 2, host), "--start-timeout", 3, "script.py"),
            script=HANG,
        )
        for host in (0, 1)
    ]
    (_, _, first), (_, _, second) = ends(jobs)
    assert "1 of 2 hosts are here" in first
    assert "isn't the launcher of this job" in second


SOON = (
    "from kerasdist.transport.rendezvous import waiting_notice as w; "
    "w.FIRST_SECONDS = w.AGAIN_SECONDS = 0.5"
)


def test_launchers_say_for_whom_they_wait(
    hosts: Hosts, launchers: list[Launcher]
) -> None:
    """Host 2 comes when the others have said that it is missing."""
    jobs = {}
    lines: dict[int, str] = {}
    for host, expected in ((1, "Missing: host 0: "), (0, "Here: host 0, host 1 (")):
        options = nodes(hosts, 3, host)
        jobs[host] = launchers[host].start(
            *("-n", 1, *options, "script.py"), script=SHOW, before=SOON
        )
        lines[host] = ""
        while expected not in lines[host]:
            lines[host] = jobs[host].stderr.readline()
            assert lines[host], "it has ended"
    connected = ""
    while "host 0 waits for them" not in connected:
        connected = jobs[1].stderr.readline()
        assert connected, "it has ended"
    options = nodes(hosts, 3, 2)
    jobs[2] = launchers[2].start(*("-n", 1, *options, "script.py"), script=SHOW)
    assert [code for code, _, _ in ends(list(jobs.values()))] == [0, 0, 0]
    assert lines[1].startswith("kerasdist run: host 1 has been waiting for host 0 (")
    assert "connection refused: nothing listens there." in lines[1]
    assert "s (--start-timeout)." in lines[1]
    assert lines[0].startswith(
        "kerasdist run: host 0 has been waiting for 1 of 3 hosts"
    )
    assert f"Here: host 0, host 1 ({hosts.address(1)})." in lines[0]


def test_no_secret_is_an_error(hosts: Hosts, launchers: list[Launcher]) -> None:
    del launchers[0].env["KERASDIST_SECRET"]
    code, _, err = launchers[0].run("-n", 1, *nodes(hosts, 2, 0), "x.py", script=HANG)
    assert code == 2
    assert "several hosts need a secret" in err


TRAIN = """
import keras, numpy as np
import kerasdist

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with kerasdist.RingStrategy(elastic=ELASTIC).scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark(f"up-{rank}", os.getpid())
        time.sleep(SLEEP)

history = model.fit(x, x[:, :1], epochs=EPOCHS, verbose=2, callbacks=[Pace()]).history
mark(f"loss-{rank}", json.dumps(history["loss"]))
"""


def train(elastic: bool, epochs: int, sleep: float) -> str:
    text = TRAIN.replace("ELASTIC", str(elastic)).replace("EPOCHS", str(epochs))
    return text.replace("SLEEP", str(sleep))


def test_a_model_trains_on_two_hosts(hosts: Hosts, launchers: list[Launcher]) -> None:
    jobs = [
        launchers[host].start(
            *("-n", 1, *nodes(hosts, 2, host), "script.py"), script=train(False, 2, 0.0)
        )
        for host in (0, 1)
    ]
    found = ends(jobs)
    assert [code for code, _, _ in found] == [0, 0], found
    assert "Epoch 2/2" in found[0][1]
    texts = [(launchers[host].folder / f"loss-{host}").read_text() for host in (0, 1)]
    assert texts[0] == texts[1]


@pytest.mark.soak
@pytest.mark.parametrize("elastic", [False, True])
def test_a_worker_is_lost(
    hosts: Hosts, launchers: list[Launcher], elastic: bool
) -> None:
    """Both launchers end; an elastic job continues on the other host."""
    options = ["--elastic"] if elastic else []
    jobs = [
        launchers[host].start(
            *("-n", 1, *options, *nodes(hosts, 2, host), "script.py"),
            script=train(elastic, 400, 0.05),
        )
        for host in (0, 1)
    ]
    (pid,) = launchers[1].pids("up-1")
    os.kill(pid, signal.SIGKILL)
    found = ends(jobs)
    assert found[1][0] == 137, found[1]
    assert (found[0][0] == 0) == elastic, found[0]
