import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ssh import SshHosts

from launching import HANG, PRELUDE
from pace import bound
from waiting import wait_until
from workers import ended

ROOT = Path(__file__).parents[4]
_WHY_NOT = SshHosts.available()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))


@pytest.fixture(scope="module")
def hosts():
    with SshHosts(3) as made:
        for host, name in enumerate(made.names):
            subprocess.run(
                [
                    *("ip", "-n", name, "address", "add", f"fd77::{host + 1}/64"),
                    *("dev", "eth0", "nodad"),
                ],
                check=True,
                timeout=bound(30),
            )
        yield made


@pytest.fixture(autouse=True)
def _on_the_first(hosts, launcher):
    launcher.prefix = hosts.prefix(0)


def arguments(hosts, *slots, first=1):
    named = [f"{hosts.address(first + i)}:{each}" for i, each in enumerate(slots)]
    return ["-H", ",".join(named), "--ssh", hosts.ssh]


def test_workers_run_on_their_hosts(hosts, launcher):
    """In the same folder; the secret is on no command line; the output is as usual."""
    script = """
    kind = config["task"]["type"]
    address = config["cluster"][kind][rank].rpartition(":")[0]
    names = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout
    secret = os.environ["KERASDIST_SECRET"]
    def command(path):
        try:
            return path.read_text()
        except OSError:  # it has ended
            return ""
    shown = [p for p in Path("/proc").glob("[0-9]*/cmdline") if secret in command(p)]
    mark(f"{kind}-{rank}", json.dumps([address in names, os.getcwd(), len(shown)]))
    print(f"I am {rank}", os.environ.get("MINE"), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    """
    code, out, err = launcher.run(
        *arguments(hosts, 2, 1, first=0),
        *("--ps", 3, "-x", "MINE=yes", "--output", "all", "script.py"),
        script=script,
    )
    assert code == 0, err
    others = ("1", "2", "ps 0", "ps 1", "ps 2")
    assert sorted(out.splitlines()) == sorted(
        ["I am 0 yes"]
        + [f"[{each}] I am {each[-1]} yes" for each in others]
        + [f"[{each}] to stderr" for each in others]
    )
    assert "to stderr" in err
    texts = [path.read_text() for path in launcher.folder.glob("*-[0-2]")]
    assert texts == [f'[true, "{launcher.folder}", 0]'] * 6


def test_a_lost_connection(hosts, launcher):
    job = launcher.start(*arguments(hosts, 1, 1), "script.py", script=HANG, quick=True)
    launcher.wait_for("up-0", "up-1")
    _session_of(hosts.address(2), job.pid).kill()
    _, err = job.communicate(timeout=bound(60))
    assert "rank 1 was ended by signal SIGHUP" in err
    assert f"the connection to {hosts.address(2)} has ended" in err
    assert job.returncode == 128 + 1
    launcher.nothing_runs()


def _session_of(address, launcher):
    """Return the `ssh` through which a task runs, not the one that holds its ports."""
    (found,) = (
        process
        for process in psutil.Process(launcher).children(recursive=True)
        if process.name() == "ssh"
        and {address, "ControlMaster=no"} <= set(process.cmdline())
    )
    return found


@pytest.mark.soak
def test_ctrl_c_reaches_the_scripts(hosts, launcher):
    """Twice it ends at once those that don't want to end."""
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        hang()
    except KeyboardInterrupt:
        mark(f"saved-{rank}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wait_for("never")
    """
    job = launcher.start(
        *(*arguments(hosts, 1, 1), "script.py"),
        script=script,
        before="from kerasdist.cli.run import supervisor as s; s.TWICE = 0; "
        "s.INTERRUPT_TO_TERM = s.TERM_TO_KILL = 100",
    )
    launcher.wait_for("up-0", "up-1")
    job.send_signal(signal.SIGINT)
    launcher.wait_for("saved-0", "saved-1")
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=bound(60))
    assert job.returncode == 130
    launcher.nothing_runs()


@pytest.mark.soak
def test_a_killed_launcher_leaves_nothing(hosts, launcher):
    script = 'subprocess.Popen(["sleep", "1000"], start_new_session=True)\n' + HANG
    job = launcher.start(*arguments(hosts, 1, 1), "script.py", script=script)
    launcher.wait_for("up-0", "up-1")
    job.kill()
    job.communicate(timeout=bound(60))
    launcher.nothing_runs()


def _other_python(launcher):
    path = launcher.folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_hosts_that_cannot_be_used(hosts, launcher):
    names = (hosts.address(1), "no-such-host.invalid")
    options = ("-H", ",".join(names), "--ssh", hosts.ssh)
    code, out, err = launcher.run(
        *(*options, "--python", _other_python(launcher), "script.py"),
        script='mark("started")',
    )
    assert (code, out) == (2, "")
    assert f"{names[0]} differs in its kerasdist: not installed." in err
    assert f"{names[1]} can't be used: ssh: Could not resolve hostname" in err
    assert not (launcher.folder / "started").exists()


# What TensorFlow has takes seconds.
NO_DEVICES = "from kerasdist.cli import doctor; doctor.check_devices = lambda _: []"


def doctor(launcher, *options):
    launcher.verb = "doctor"
    code, out, err = launcher.run(*options, "--json", before=NO_DEVICES)
    assert "Traceback" not in err
    found = {each["name"]: each["findings"] for each in json.loads(out)["sections"]}
    assert found["cluster"][0]["text"].startswith("a job on hosts that ssh reaches: ")
    assert "Not looked at: the script, " in found["cluster"][0]["text"]
    return code, [*found["hosts"], *found["ports"]]


def test_the_doctor_asks_the_hosts(hosts, launcher):
    """As the launcher does; and each tries to reach the others."""
    code, found = doctor(launcher, *arguments(hosts, 1, 1, 1, first=0))
    assert code == 0, found
    for each, name in zip(found, hosts.addresses, strict=False):
        assert each["text"].startswith(f"{name} has the folder and versions of this ")
    for each, name in zip(found[3:], hosts.addresses, strict=True):
        assert each["level"] == "ok"
        others = [other for other in hosts.addresses if other != name]
        begin = rf"{name} reaches {others[0]}:\d+, {others[1]}:\d+"
        assert re.fullmatch(begin, each["text"])
    launcher.nothing_runs()


def test_the_doctor_names_hosts_that_do_not_fit(hosts, launcher):
    first, second = hosts.address(1), hosts.address(2)
    (launcher.folder / "hosts.txt").write_text(f"{first}\n{second}\n10.77.0.200\n")
    options = ("--hostfile", "hosts.txt", "--timeout", "1")
    ssh = ("--ssh", f"{hosts.ssh} -o ConnectTimeout=1")
    route = ("ip", "-n", hosts.names[1], "route")
    way = ("unreachable", f"{second}/32")
    subprocess.run([*route, "add", *way], check=True, timeout=bound(30))
    try:
        code, found = doctor(launcher, *options, *ssh)
    finally:
        subprocess.run([*route, "del", *way], check=True, timeout=bound(30))
    assert code == 1
    assert [each["level"] for each in found] == ["ok"] * 2 + ["fault", "warn"] + [
        *("fault", "fault")
    ]
    assert all(each["remedy"] for each in found[2:])
    assert found[2]["text"].startswith("10.77.0.200 can't be used: ssh: connect to ")
    assert found[3]["text"] == "no port of 10.77.0.200 was tried, which can't be used"
    assert re.match(rf"{first} can't reach {second}:\d+: ", found[4]["text"])
    assert re.match(rf"{second} can't reach {first}:\d+: no answer", found[5]["text"])

    launcher.nothing_runs()


@pytest.mark.soak
def test_many_tasks_of_one_host(hosts, launcher):
    """More than sshd allows by one connection, without a word of ssh's about it."""
    code, _, err = launcher.run(
        *arguments(hosts, 12), "script.py", script='mark(f"rank-{rank}")'
    )
    assert code == 0, err
    assert all((launcher.folder / f"rank-{rank}").exists() for rank in range(12))
    assert [line for line in err.splitlines() if "kerasdist run: " not in line] == []


@pytest.mark.soak
def test_a_cut_network(hosts, launcher):
    """Both sides notice it: nothing goes on on the host that is cut off."""
    job = launcher.start(*arguments(hosts, 1, 1), "script.py", script=HANG)
    _, pid = launcher.pids("up-0", "up-1")
    hosts.cut(2)
    try:
        _, err = job.communicate(timeout=bound(60))
        assert "rank 1 was ended by signal SIGHUP" in err
        wait_until(lambda: not psutil.pid_exists(pid), "the end there", 60.0)
    finally:
        hosts.join(2)


# README's script trains in `test_docs`, by `RingStrategy`; here its ring is enough.
RING = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
job = connect(resolve())
(total,) = job.communicator.all_reduce([np.float32([rank + 1])])
mark(f"total-{rank}", [job.transport, *total.tolist()])
job.communicator.barrier()
"""


def test_the_commands_of_the_readme(hosts, launcher):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## Several machines")[1].split("bash\n")[1].split("```")[0]
    shown = [shlex.split(line) for line in block.splitlines()]
    assert shown[0][:2] == ["pip", "install"]
    for host, address in ((1, hosts.address(1)), (2, "[fd77::3]")):
        shown[1] = [word.replace(f"host{host}", address) for word in shown[1]]
    kerasdist, verb, *options, path = shown[1]
    assert (kerasdist, verb, options[0]) == ("kerasdist", "run", "-H")
    (launcher.folder / path).write_text(PRELUDE + RING)
    code, _, err = launcher.run(*options, "--ssh", hosts.ssh, path)
    assert code == 0, err
    found = launcher.wait_for("total-0", "total-1")
    assert found == ["['tcp', 3.0]"] * 2


def test_a_lost_worker_of_an_elastic_job(hosts, launcher):
    script = """
    mark(f"up-{rank}-" + os.environ["KERASDIST_INCARNATION"], os.getpid())
    address = config["cluster"]["worker"][rank].rpartition(":")[0]
    names = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout
    wait_for("up-1-1")
    sys.exit(address not in names)
    """
    options = (*arguments(hosts, 1, 1), "--elastic", "--restarts", 1)
    job = launcher.start(*options, "script.py", script=script)
    _, pid = launcher.pids("up-0-0", "up-1-0")
    os.kill(pid, signal.SIGKILL)
    _, err = job.communicate(timeout=bound(60))
    assert job.returncode == 0, err
    assert f"rank 1 ({hosts.address(2)}:" in err
    assert "finished: rank 0, rank 1; lost: rank 1 (SIGKILL); started again: " in err


FUNCTION = """
import json, os, subprocess, sys, time
import kerasdist

HOSTS, SSH = sys.argv[1:]
def function(data):
    config = json.loads(os.environ["TF_CONFIG"])
    rank = config["task"]["index"]
    address = config["cluster"]["worker"][rank].rpartition(":")[0]
    mine = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout
    print(f"I am {rank}")
    return rank, address in mine, data[::-1], os.environ["MINE"], os.getcwd()

# More than a pipe holds, and not a multiple of what is read at once.
data = os.urandom(3_000_001)
found = kerasdist.run(
    function, args=(data,), hosts=HOSTS.split(), ssh=SSH, env={"MINE": "yes"}
)
right = [(rank, True, data[::-1], "yes", os.getcwd()) for rank in range(2)]
print("results", found == right)
"""


@pytest.mark.soak
def test_a_function_runs_on_hosts(hosts, launcher):
    """The function and its results travel through ssh; no file is shared for them."""
    (launcher.folder / "script.py").write_text(FUNCTION)
    addresses = f"{hosts.address(0)} {hosts.address(1)}"
    command = (*hosts.prefix(0), sys.executable, "script.py", addresses, hosts.ssh)
    done = ended(*command, cwd=launcher.folder, env=launcher.env)
    assert done.returncode == 0, done.stdout + done.stderr
    launcher.nothing_runs()
    assert done.stdout == "I am 0\nresults True\n"
    assert launcher.temporary() == []


@pytest.mark.soak
def test_predict_measures_the_network_between_hosts(hosts, launcher):
    (launcher.folder / "train.py").write_text("""
import keras, numpy, kerasdist
with kerasdist.RingStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((800, 8)), numpy.ones(800), batch_size=16, verbose=0)
""")
    launcher.verb = "predict"
    found = arguments(hosts, 1, 1, first=0)
    options = ("--workers", "2,4", "--steps", "10", "--json", "train.py")
    code, out, err = launcher.run(*found, *options, within=100.0)
    assert code == 0, err
    latency, byte = json.loads(out)["profile"]["link"]
    assert latency > 0
    assert byte > 0
