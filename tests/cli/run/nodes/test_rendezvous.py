"""The rendezvous of launchers, without other hosts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kerasdist import cli
from kerasdist.cli.run import command
from kerasdist.cli.run.nodes import LocalPart, meeting
from kerasdist.cli.run.options import NodeOptions
from kerasdist.transport import log
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.dial import dial_tcp, retry
from pace import bound
from workers import free_ports

SECRET = b"secret" * 8


def options_at(rendezvous: str, count: int) -> NodeOptions:
    return NodeOptions(count=count, rank=0, rendezvous=rendezvous, seconds=60)


def test_an_error_of_the_block_is_unchanged() -> None:
    options = options_at(f"127.0.0.1:{free_ports(1)[0]}", 1)
    with pytest.raises(PermissionError), meeting(options, 1, 0, SECRET):
        raise PermissionError("a folder")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "1 of 2 hosts are here, after 1 s (--start-timeout)"),
        ("192.0.2.1", "rendezvous at 192"),  # isn't an own address
    ],
)
def test_a_job_that_does_not_start(tmp_path, monkeypatch, said, host, words) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.setenv("KERASDIST_SECRET", SECRET.decode())
    monkeypatch.delattr(command, "run_supervised")
    place = ("--rendezvous", f"{host}:{free_ports(1)[0]}", "--start-timeout", "1")
    options = ("-n", "1", "--nnodes", "2", "--node-rank", "0", *place)
    assert cli.main(["run", *options, str(tmp_path / "script.py")]) == 1
    log.flush(None)
    assert words in said()[-1]


def test_who_does_not_fit_is_refused_with_the_reason() -> None:
    """Also one that holds the secret: its addresses go into all tasks' TF_CONFIG."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    deadline = Deadline(bound(60))

    def meet() -> LocalPart:
        with meeting(options_at(address, 2), 1, 0, SECRET) as part:
            return part

    def ask(**changed: Any) -> dict[str, Any]:
        tasks = {"worker": ["h:1"], "ps": []}
        hello = {"session": "kerasdist run", "purpose": "node", "rank": 1}
        hello |= {"count": 2, "tasks": tasks, **changed}
        connection = retry(
            lambda: dial_tcp(address, SECRET, hello, deadline),
            *(deadline, 1, address, threading.Event()),
        )
        with connection:
            return dict(connection.read_json(deadline)[1])

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet)
        for workers in ([5], [None], ["h"], ["h:\x1b[31m1"], [["h:1"]], ["h:99999"]):
            fault = ask(tasks={"worker": workers, "ps": []})["fault"]
            assert fault.startswith("an address of a task "), workers
            assert "\x1b" not in fault
        for changed, fault in (
            (
                {"tasks": {"worker": ["h:1", "h:1"], "ps": []}},
                "it names an address that",
            ),
            ({"tasks": {"worker": ["h:1"]}}, "it names no tasks"),
            ({"count": 3}, "it was started with --nnodes 3, and the host of the rende"),
            ({"rank": 0}, "there is a host with --node-rank 0 already"),
            ({"facts": {}}, "one of `kerasdist run` and `kerasdist doctor` was"),
        ):
            assert ask(**changed)["fault"].startswith(fault)
        found = ask(rank=-1)
        assert found["first"] == {"worker": 1, "ps": 0}
        cluster = found["cluster"]
        assert cluster["worker"][1:] == ["h:1"]
        assert first.result(bound(60)).cluster == cluster
