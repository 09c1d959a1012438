"""`kerasdist doctor --nnodes`: doctors that meet as launchers do.

`tests/cli/run/hosts/test_run_on_hosts.py` has `kerasdist doctor -H`.
"""

from __future__ import annotations

import json
import signal

import pytest

from launching import Launcher
from pace import bound
from workers import free_ports

pytestmark = pytest.mark.timeout(120)
# What TensorFlow has takes seconds.
NO_DEVICES = "from kerasdist.cli import doctor; doctor.check_devices = lambda _: []"


def meet(
    launchers: list[Launcher], *options: object, **before: str
) -> list[tuple[int, list[dict[str, str]]]]:
    (port,) = free_ports(1)
    options = ("--rendezvous", f"127.0.0.1:{port}", "--timeout", bound(5), *options)
    jobs = []
    for rank, launcher in enumerate(launchers):
        launcher.verb = "doctor"
        more = f"{NO_DEVICES}; {before.get(f'host_{rank}', 'pass')}"
        arguments = ("--json", "--nnodes", len(launchers), *options)
        jobs.append(launcher.start(*arguments, "--node-rank", rank, before=more))
    found = []
    for job in jobs:
        out, err = job.communicate(timeout=bound(60))
        assert "Traceback" not in err
        listed = [
            finding
            for each in json.loads(out)["sections"]
            if each["name"] in ("hosts", "peers")
            for finding in each["findings"]
        ]
        found.append((job.returncode, listed))
    for launcher in launchers:
        launcher.nothing_runs()
    return found


def test_two_hosts_meet(launchers: list[Launcher]) -> None:
    for rank, (code, found) in enumerate(meet(launchers[:2])):
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
    another = "import platform; platform.python_version = lambda: '2.7'"
    options = ("--start-timeout", round(bound(2)))
    first, second, third = meet(launchers, *options, host_2=another)
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
        assert "on all 3 hosts, with the same secret" in missing["remedy"]
        assert texts[-1].endswith(") accepts connections")


def test_a_doctor_does_not_meet_a_job_which_ctrl_c_ends(
    launchers: list[Launcher],
) -> None:
    (port,) = free_ports(1)
    options = ("--nnodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--node-rank")
    script = 'mark("started")'
    job = launchers[0].start("-n", 1, *options, 0, "script.py", script=script)
    launchers[1].verb = "doctor"
    code, out, _ = launchers[1].run(*options, 1, before=NO_DEVICES)
    assert code == 1
    assert "FAULT host 0 has refused this one: one of `kerasdist run` and `kera" in out
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=bound(60))
    assert job.returncode == 130
    assert "Traceback" not in err
    assert not (launchers[0].folder / "started").exists()
