import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import time

import pytest

from certificates import Authority
from kerasdist import cli
from kerasdist.cli import doctor
from kerasdist.cli.env import gpus
from kerasdist.cluster import Cluster
from pace import bound
from workers import free_ports, output_of


def levels(found):
    return [finding.level for finding in found]


def cluster_of(*addresses, rank=0):
    return Cluster(rank=rank, size=len(addresses), workers=addresses)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    with socket.socket() as held:  # bound, so nobody else gets it, but not listening
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def run_doctor(monkeypatch, capfd):
    """Runs the command; what TensorFlow has takes seconds, and is made up."""

    def run(*args, **env):
        monkeypatch.setattr(doctor, "check_devices", lambda seconds: [])
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        code = cli.main(["doctor", *args])
        return code, *capfd.readouterr()

    return run


def tf_config(index, *addresses):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def test_all_is_well():
    out = output_of(sys.executable, "-m", "kerasdist", "doctor")
    for line in ("kerasdist 0.", "Python 3.", "tensorflow 2.", "keras 3.", "numpy "):
        assert f"  ok    {line}" in out
    assert "  ok    workers of this machine can share memory\n" in out
    assert " cores can be used\n" in out
    assert "no cluster settings: one worker\n" in out
    assert "  ok    device CPU:0\n" in out
    assert "FAULT" not in out
    assert out.splitlines()[-1].startswith("no faults")


def test_faults_are_named_with_what_to_do(run_doctor, listener, closed):
    config = tf_config(0, listener, closed, "no-such-host.invalid:1")
    secret = "don't show me to anybody"
    env = {"TF_CONFIG": config, "KERASDIST_SECRET": secret}
    code, out, _ = run_doctor("--timeout", "1", **env)
    assert code == 1
    assert "this is rank 0 of 3 (worker 0), by TF_CONFIG\n" in out
    assert f"FAULT this task can't listen at {listener}: Address already in use" in out
    assert f"FAULT rank 1 ({closed}) can't be reached: connection refused" in out
    assert "-> start the worker there" in out
    assert "FAULT rank 2 (no-such-host.invalid:1) can't be reached: " in out
    assert "KERASDIST_SECRET is set\n" in out
    assert secret not in out
    assert out.splitlines()[-1].startswith("3 faults: ")

    code, out, _ = run_doctor("--json", "--timeout", "1", **env)
    assert (code, secret in out) == (1, False)
    document = json.loads(out)
    assert list(document)[:4] == ["command", "kerasdist", "ok", "error"]
    assert (document["command"], document["ok"]) == ("doctor", False)
    assert document["error"] is None
    names = [section["name"] for section in document["sections"]]
    assert (names[0], names[-3:]) == ("versions", ["own port", "peers", "devices"])
    found = [each for section in document["sections"] for each in section["findings"]]
    assert all(set(each) == {"level", "text", "remedy"} for each in found)
    assert document["counts"]["fault"] == 3
    faults = [each for each in found if each["level"] == "fault"]
    (lost,) = [e for e in faults if e["text"].startswith("rank 1 (127.0.0.1:")]
    assert lost["remedy"].startswith("start the worker there")


@pytest.mark.parametrize(
    ("options", "env", "shown"),
    [
        (
            "",
            {"TF_CONFIG": '{"cluster": {"worker": ["a", "b"]}}'},
            "FAULT TF_CONFIG can't be used, for 3 reasons:\n            1. cluster",
        ),
        ("", {"KERASDIST_TLS": "/nope,x,y"}, "encryption:\n  FAULT"),
        (
            "--nnodes 2 --rendezvous 192.0.2.1:1",
            {"KERASDIST_SECRET": "short"},
            "WARN  the other hosts weren't met: the secret or the certificates",
        ),
    ],
)
def test_wrong_settings_dont_stop_the_rest(run_doctor, options, env, shown):
    code, out, _ = run_doctor(*options.split(), **env)
    assert code == 1
    assert shown in out
    assert "\ndevices:\n" in out
    assert out.splitlines()[-1].startswith("1 fault")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--timeout 0", "must be a number of seconds above 0"),
        ("--timeout nan", "must be a number of seconds above 0"),
        ("--python p", "--python p without -H or --hostfile"),
        ("-H a,a", "Received: a several times"),
        ("--nnodes 2", "--rendezvous must be"),
    ],
)
def test_wrong_options(capfd, options, said):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["doctor", "--json", *options.split()])
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert error["type"] == "UsageError"
    assert said in error["message"]
    assert error["message"] in err


def test_versions(monkeypatch):
    found = list(doctor.check_versions({}))
    assert set(levels(found)) == {"ok"}
    environ = {"KERAS_BACKEND": "jax", "TF_USE_LEGACY_KERAS": "1"}
    found = list(doctor.check_versions(environ))
    assert levels(found)[-2:] == ["fault", "fault"]
    assert "KERAS_BACKEND='jax'" in found[-2].text
    # Installing an old TensorFlow for this would take minutes.
    versions = {"tensorflow": "2.9.1", "numpy": "2.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.metadata, "PackageNotFoundError", KeyError)
    texts = {finding.text: finding for finding in doctor.check_versions({})}
    old = texts["tensorflow 2.9.1 is too old, at least 2.18 is needed"]
    assert old.level == "fault"
    assert "-m pip install 'tensorflow>=2.18'" in old.remedy
    assert texts["keras isn't installed"].level == "fault"


@pytest.mark.parametrize(
    ("seconds", "code", "said"),
    [
        (60, "import sys; sys.exit('no module')", "be imported (exit code 1): no mod"),
        (60, "pass", "be imported (exit code 0): no output"),
        (
            1,
            "import subprocess as s, sys\n"
            "s.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
            "TensorFlow didn't list its devices within 1 s",
        ),
    ],
)
def test_devices_of_a_tensorflow_that_is_broken(seconds, code, said):
    began = time.monotonic()
    (found,) = doctor.check_devices(float(seconds), [sys.executable, "-c", code])
    assert time.monotonic() - began < 100.0
    assert found.level == "fault"
    assert said in found.text
    assert "import tensorflow" in found.remedy


def test_gpus_that_tensorflow_doesnt_see(tmp_path):
    folder = tmp_path / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t NVIDIA A100\nIRQ: 1\n")
    (tmp_path / "version").write_text("NVRM version: 550.1\nGCC\n")
    code = """print('noise\\nDEVICES{"devices": ["CPU:0"]}')"""
    asked = (60.0, [sys.executable, "-c", code], str(tmp_path))
    found = list(doctor.check_devices(*asked))
    assert levels(found) == ["ok", "warn"]
    assert found[1].text == "the driver knows 1 GPUs, TensorFlow sees 0"
    assert gpus(*asked) == {
        "driver": "NVRM version: 550.1",
        "GPUs of the driver": ["NVIDIA A100"],
        "TensorFlow": {"devices": ["CPU:0"]},
    }


SERVERS = {
    "cluster": {"worker": ["localhost:1"], "ps": ["localhost:2"]},
    "task": {"type": "ps", "index": 0},
}
OF_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "texts", "level"),
    [
        (
            {"TF_CONFIG": tf_config(1, "localhost:1", "host:1")},
            "this is rank 1 of 2 (worker 1), by TF_CONFIG; rank 0: localhost:1; "
            "rank 1: host:1; some addresses are loop",
            "warn",
        ),
        (
            {"TF_CONFIG": json.dumps(SERVERS)},
            "this is server 0 of 1, by TF_CONFIG; rank 0: localhost:1; server 0: local",
            "ok",
        ),
        (OF_MPI, "this is rank 1 of 2, by MPI", "ok"),
        (
            {"PMIX_RANK": "0"},
            "a process that PMIx started: only MPI knows its rank; mpi4py isn't inst",
            "fault",
        ),
    ],
)
def test_the_task(environ, texts, level, monkeypatch):
    spec = "mpi4py" if "PMIX_RANK" not in environ else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    title, section = next(doctor.check_task(1.0, environ))
    found, texts = list(section), texts.split("; ")
    assert title == "cluster"
    assert levels(found) == ["ok"] * (len(texts) - 1) + [level]
    for finding, text in zip(found, texts, strict=True):
        assert finding.text.startswith(text)


@pytest.mark.parametrize(
    ("host", "environ", "level"),
    [
        ("127.0.0.1", {}, "ok"),
        ("host", {}, "fault"),
        ("host", {"KERASDIST_INSECURE": "1"}, "warn"),
        ("host", {"KERASDIST_SECRET": "s3cr3t" * 3}, "ok"),
        ("127.0.0.1", {"KERASDIST_SECRET": "s3cr3t"}, "fault"),
    ],
)
def test_secret(host, environ, level):
    (found,) = doctor.check_secret(cluster_of(f"{host}:1", f"{host}:2"), environ)
    assert found.level == level
    assert "s3cr3t" not in repr(found)


def test_encryption(tmp_path):
    tls = Authority(folder=tmp_path).issue()
    for host, environ, level, text in [
        ("127.0.0.1", {}, "ok", "KERASDIST_TLS isn't set, and isn't needed: no addres"),
        ("host", {}, "ok", "KERASDIST_TLS isn't set, so nothing is encrypted between "),
        ("host", {"KERASDIST_TLS": tls}, "ok", "KERASDIST_TLS is set, and the certifi"),
        ("host", {"KERASDIST_TLS": "a,b,c"}, "fault", "KERASDIST_TLS can't be used: t"),
    ]:
        (found,) = doctor.check_encryption(cluster_of(f"{host}:1"), environ)
        assert found.level == level
        assert found.text.startswith(text)


def test_own_port(listener):
    free = f"127.0.0.1:{free_ports(1)[0]}"
    with doctor.own_port(cluster_of(free), {}) as found:
        assert levels(found) == ["ok"]
        assert doctor.why_unreachable(free, 5.0) is None
    assert doctor.why_unreachable(free, 5.0) is not None
    # The documentation's network: no machine has an address of it.
    with doctor.own_port(cluster_of("203.0.113.7:1"), {}) as found:
        assert levels(found)[0] in ("warn", "fault")
    with doctor.own_port(cluster_of(listener), {"KERASDIST_LISTEN_FD": "3"}) as found:
        assert levels(found) == ["ok"]


def test_a_server_looks_for_its_workers_also_for_one_that_comes_later():
    with socket.socket() as worker:
        worker.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{worker.getsockname()[1]}"
        reasons = []

        def probe(address, seconds):
            reasons.append(doctor.why_unreachable(address, seconds))
            worker.listen()  # after the first look
            return reasons[-1]

        place = {"size": 1, "workers": (address,), "servers": ("127.0.0.1:1",)}
        server = Cluster(rank=None, task_type="ps", **place)
        (found,) = doctor.check_peers(server, 20.0, probe)
        assert found.text == f"rank 0 ({address}) accepts connections"
        assert reasons == ["connection refused: nothing listens there", None]


def test_shared_memory():
    (found,) = doctor.check_shared_memory()
    assert (found.level, found.text[:7]) == ("ok", "workers")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, most))
    try:
        (found,) = doctor.check_shared_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert found.level == "fault"
    assert found.text.startswith("memory can't be shared: There is no memory for a buf")


def test_cores(tmp_path):
    (found,) = doctor.check_cores(str(tmp_path))  # there is no limit
    assert found.level == "ok"
    assert f"{len(os.sched_getaffinity(0))} of " in found.text
    (tmp_path / "cpu.max").write_text("50000 100000")
    (found,) = doctor.check_cores(str(tmp_path))
    assert found.level == "warn"
    assert found.text.endswith("but this container gets the time of 0.5")
    assert "TF_NUM_INTRAOP_THREADS=1" in found.remedy


# `tests/cli/run/hosts/test_run_on_hosts.py` has `kerasdist doctor -H`.

# What TensorFlow has takes seconds.
NO_DEVICES = "from kerasdist.cli import doctor; doctor.check_devices = lambda _: []"


def meet(launchers, *options, **before):
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


def test_two_hosts_meet(launchers):
    for rank, (code, found) in enumerate(meet(launchers[:2])):
        assert code == 0, found
        words = ["is here, with the same versions"] * 2
        words[rank] = "is this one"
        texts = [each["text"] for each in found]
        assert texts[:2] == [f"host {i} (127.0.0.1) {words[i]}" for i in (0, 1)]
        assert texts[2].startswith(f"host {1 - rank} (127.0.0.1:")
        assert texts[2].endswith(") accepts connections")


def test_another_secret_and_another_python(launchers):
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


def test_a_doctor_does_not_meet_a_job_which_ctrl_c_ends(launchers):
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
