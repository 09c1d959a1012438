"""`kerasdist doctor --nnodes`: doctors that meet as launchers do.

`tests/cli/run/hosts/test_run_on_hosts.py` has `kerasdist doctor -H`.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kerasdist import cli
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable
from launching import Launcher, launcher_in
from pace import bound
from waiting import wait_until
from workers import free_ports

pytestmark = pytest.mark.timeout(120)
SECRET = "0123456789abcdef" * 2
# What TensorFlow has takes seconds.
NO_DEVICES = "from kerasdist.cli import doctor; doctor.check_devices = lambda _: []"


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[list[Launcher]]:
    with contextlib.ExitStack() as undo:
        made = []
        for host in range(3):
            (tmp_path / str(host)).mkdir()
            launcher = undo.enter_context(launcher_in(tmp_path / str(host)))
            launcher.env["KERASDIST_SECRET"] = SECRET
            launcher.verb = "doctor"
            made.append(launcher)
        yield made


def meet(
    launchers: list[Launcher],
    ranks: list[int],
    *options: object,
    before: dict[int, str] | None = None,
) -> list[tuple[int, list[dict[str, str]]]]:
    """Return the exit code of each doctor, and what it says about hosts and peers."""
    (port,) = free_ports(1)
    options = ("--rendezvous", f"127.0.0.1:{port}", "--timeout", bound(5), *options)
    jobs = []
    for rank in ranks:
        more = (before or {}).get(rank, "pass")
        arguments = ("--json", *options, "--node-rank", rank)
        jobs.append(launchers[rank].start(*arguments, before=f"{NO_DEVICES}; {more}"))
    found = []
    for job in jobs:
        out, err = job.communicate(timeout=bound(60))
        assert "Traceback" not in err
        sections = json.loads(out)["sections"]
        listed = [
            finding
            for each in sections
            if each["name"] in ("hosts", "peers")
            for finding in each["findings"]
        ]
        found.append((job.returncode, listed))
    for launcher in launchers:
        launcher.nothing_runs()
    return found


def test_two_hosts_meet(launchers: list[Launcher]) -> None:
    for rank, (code, found) in enumerate(meet(launchers, [0, 1], "--nnodes", 2)):
        assert code == 0, found
        words = ["is here, with the same versions"] * 2
        words[rank] = "is this one"
        texts = [each["text"] for each in found]
        assert texts[:2] == [f"host {i} (127.0.0.1) {words[i]}" for i in (0, 1)]
        assert texts[2].startswith(f"host {1 - rank} (127.0.0.1:")
        assert texts[2].endswith(") accepts connections")


def test_another_secret_and_another_python(launchers: list[Launcher]) -> None:
    """Those that came say so of the one that didn't; nobody waits for it for ever."""
    launchers[1].env["KERASDIST_SECRET"] = "f" * 32
    options = ("--nnodes", 3, "--start-timeout", round(bound(2)))
    another = {2: "import platform; platform.python_version = lambda: '2.7'"}
    first, second, third = meet(launchers, [0, 1, 2], *options, before=another)
    assert [code for code, _ in (first, second, third)] == [1, 1, 1]
    (finding,) = second[1]
    assert finding["text"].startswith("the process at 127.0.0.1:")
    assert "doesn't hold the same job secret" in finding["text"]
    for rank, other, (_, found) in ((0, 2, first), (2, 0, third)):
        texts = [each["text"] for each in found]
        assert f"host {rank} (127.0.0.1) is this one" in texts
        (differs,) = [text for text in texts if "differs" in text]
        assert differs.startswith(f"host {other} (127.0.0.1) differs in its Python: ")
        (missing,) = [each for each in found if "come in time" in each["text"]]
        assert missing["level"] == "fault"
        assert missing["text"].startswith("1 of 3 hosts didn't come in time: host 1 (")
        assert "doesn't hold the same job secret" in missing["text"]
        assert "with the same secret" in missing["remedy"]
        assert texts[-1].endswith(") accepts connections")


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "1 of 2 hosts didn't come in time: host 1 (--start-timeout 1)"),
        (1, "host 0 isn't at 127.0.0.1:"),
    ],
)
def test_a_host_that_does_not_come(
    launchers: list[Launcher], rank: int, words: str
) -> None:
    options = ("--nnodes", 2, "--start-timeout", 1)
    ((code, found),) = meet(launchers, [rank], *options)
    assert code == 1
    (fault,) = [each for each in found if each["level"] == "fault"]
    assert fault["text"].startswith(words)
    assert "on all 2 hosts" in fault["remedy"]


def test_a_doctor_does_not_meet_a_job(launchers: list[Launcher]) -> None:
    (port,) = free_ports(1)
    options = ("--nnodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--node-rank")
    launchers[0].verb = "run"
    script = 'mark("started")'
    job = launchers[0].start("-n", 1, *options, 0, "script.py", script=script)
    code, out, _ = launchers[1].run(*options, 1, before=NO_DEVICES)
    assert code == 1
    assert "FAULT host 0 has refused this one: one of `kerasdist run` and `kera" in out
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=bound(60))
    assert not (launchers[0].folder / "started").exists()


def test_ctrl_c_while_others_are_waited_for(launchers: list[Launcher]) -> None:
    (port,) = free_ports(1)
    options = ("--nnodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--node-rank", 0)
    job = launchers[0].start(*options)

    def listens() -> bool:
        return why_unreachable(f"127.0.0.1:{port}", bound(5)) is None

    wait_until(listens, "the rendezvous")
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=bound(60))
    assert job.returncode == 130
    assert "Traceback" not in err
    assert not listens()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--python", "p"), ["--python p without -H or --hostfile"]),
        (("--node-rank", "1"), ["Received: --node-rank 1 without --nnodes"]),
        (
            ("-H", "a", "--nnodes", "2", "--rendezvous", "a:1"),
            ["can't be used together. Received: both. Expected -H where ssh"],
        ),
        (("-H", "a,a"), ["each host once", "Received: a several times"]),
        (("--nnodes", "2"), ["--rendezvous must be", "several hosts need a secret"]),
        (("--hostfile", "nowhere"), ["--hostfile must be a text file. Received: "]),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[str, ...],
    words: list[str],
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KERASDIST_SECRET", raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["doctor", *options])
    out, err = capfd.readouterr()
    assert out == ""
    for each in words:
        assert each in err


def test_a_secret_that_cannot_be_used(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kerasdist.cli import doctor

    monkeypatch.setattr(doctor, "check_devices", lambda seconds: [])
    monkeypatch.setenv("KERASDIST_SECRET", "short")
    options = ["--nnodes", "2", "--rendezvous", "192.0.2.1:1"]
    assert cli.main(["doctor", *options]) == 1
    out, _ = capfd.readouterr()
    assert "FAULT KERASDIST_SECRET is too short." in out
    assert "WARN  the other hosts weren't met: the secret or the certificates" in out
