"""`kerasdist doctor`, and the findings it is made of."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest

from certificates import Authority
from kerasdist import cli
from kerasdist.cli import doctor
from kerasdist.cli.env import find_allocator
from kerasdist.cluster import Cluster
from pace import bound
from workers import free_ports, python_env

pytestmark = pytest.mark.timeout(150)


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


# --- the command ---


def test_all_is_well():
    done = subprocess.run(
        [sys.executable, "-m", "kerasdist", "doctor"],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=bound(140),
        check=False,
    )
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
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


def test_wrong_settings_dont_stop_the_rest(run_doctor):
    code, out, _ = run_doctor(TF_CONFIG='{"cluster": {"worker": ["a", "b"]}}')
    assert code == 1
    assert "FAULT TF_CONFIG can't be used, for 3 reasons:\n" in out
    assert "            1. cluster['worker'][0] has no port." in out
    assert out.splitlines()[-1].startswith("1 fault")


def test_certificates_are_checked_without_a_cluster(run_doctor):
    code, out, _ = run_doctor(KERASDIST_TLS="/nope,x,y")
    assert code == 1
    assert "no cluster settings: one worker\n" in out
    assert "No other host was looked at" in out
    assert "  FAULT" in out.partition("encryption:")[2]


def test_json_has_the_findings(run_doctor, closed):
    config = tf_config(0, "127.0.0.1:1", closed)
    code, out, _ = run_doctor("--json", "--timeout", "1", TF_CONFIG=config)
    assert code == 1
    document = json.loads(out)
    assert list(document)[:4] == ["command", "kerasdist", "ok", "error"]
    assert (document["command"], document["ok"]) == ("doctor", False)
    assert document["error"] is None
    names = [section["name"] for section in document["sections"]]
    assert names[0] == "versions"
    assert names[-3:] == ["own port", "peers", "devices"]
    found = [each for section in document["sections"] for each in section["findings"]]
    assert all(set(each) == {"level", "text", "remedy"} for each in found)
    count = [each["level"] for each in found].count
    assert document["counts"] == {
        level: count(level) for level in ("ok", "warn", "fault")
    }
    (lost,) = [each for each in found if each["text"].startswith("rank 1 (")]
    assert lost["level"] == "fault"
    assert lost["remedy"].startswith("start the worker there")


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "inf"])
def test_a_wrong_timeout(capfd, seconds):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["doctor", "--timeout", seconds, "--json"])
    out, err = capfd.readouterr()
    assert "usage: kerasdist doctor" in err
    assert "must be a number of seconds above 0" in err
    error = json.loads(out)["error"]
    assert error["type"] == "UsageError"
    assert error["message"] in err


# --- its findings ---


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


def test_devices_of_a_tensorflow_that_is_broken():
    for code, said in (
        ("import sys; sys.exit('no module')", "(exit code 1): no module"),
        ("import os; os.abort()", "(exit code -6): no output"),
        ("pass", "(exit code 0): no output"),
    ):
        (found,) = doctor.check_devices(60.0, [sys.executable, "-c", code])
        assert found.level == "fault"
        assert found.text == f"TensorFlow can't be imported {said}"
        assert "import tensorflow" in found.remedy


def test_devices_of_a_tensorflow_that_hangs_with_a_child():
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    began = time.monotonic()
    (found,) = doctor.check_devices(1.0, [sys.executable, "-c", code])
    assert time.monotonic() - began < 100.0
    assert found.level == "fault"
    assert found.text == "TensorFlow didn't list its devices within 1 s"


def test_gpus_that_tensorflow_doesnt_see(tmp_path):
    folder = tmp_path / "gpus" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: NVIDIA A100\n")
    (tmp_path / "version").write_text("NVRM version: 550.1\n")
    code = """print('noise\\nDEVICES{"devices": ["CPU:0"]}')"""
    command = [sys.executable, "-c", code]
    found = list(doctor.check_devices(60.0, command, str(tmp_path)))
    assert levels(found) == ["ok", "warn"]
    assert found[1].text == "the driver knows 1 GPUs, TensorFlow sees 0"


def test_cluster():
    def found(**environ):
        title, found = next(doctor.check_task(1.0, environ))
        assert title == "cluster"
        return list(found)

    (alone,) = found()
    assert alone.level == "ok"
    assert alone.text.startswith("no cluster settings: one worker\n")
    assert levels(found(TF_CONFIG="{")) == ["fault"]
    place, *others = found(TF_CONFIG=tf_config(1, "localhost:1", "host:1"))
    assert place.text == "this is rank 1 of 2 (worker 1), by TF_CONFIG"
    assert levels([place, *others]) == ["ok", "ok", "ok", "warn"]
    assert [each.text for each in others[:2]] == [
        "rank 0: localhost:1",
        "rank 1: host:1",
    ]
    cluster = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    task = {"type": "ps", "index": 0}
    config = json.dumps({"cluster": cluster, "task": task})
    assert [each.text for each in found(TF_CONFIG=config)] == [
        "this is server 0 of 1, by TF_CONFIG",
        "rank 0: localhost:1",
        "server 0: localhost:2",
    ]


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "this is rank 1 of 2, by MPI",
        ),
        ({"PMIX_RANK": "0"}, "a process that PMIx started: only MPI knows its rank"),
    ],
)
def test_a_process_of_mpi(environ, text, monkeypatch):
    for spec in ("mpi4py", None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        _, section = next(doctor.check_task(1.0, environ))
        place, *faults = section
        assert (place.level, place.text) == ("ok", text)
        assert levels(faults) == ([] if spec else ["fault"])


@pytest.mark.parametrize(
    ("host", "environ", "level"),
    [
        ("127.0.0.1", {}, "ok"),
        ("[::1]", {}, "ok"),
        ("host", {}, "fault"),
        ("host", {"KERASDIST_INSECURE": "1"}, "warn"),
        ("host", {"KERASDIST_INSECURE": "0"}, "fault"),
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
        cluster = cluster_of(f"{host}:1", f"{host}:2")
        (found,) = doctor.check_encryption(cluster, environ)
        assert found.level == level
        assert found.text.startswith(text)
    assert found.remedy.startswith('expected "certificate,key,ca": three files in PEM')


def test_own_port_is_open_meanwhile_and_closed_afterwards():
    free = f"127.0.0.1:{free_ports(1)[0]}"
    with doctor.own_port(cluster_of(free), {}) as found:
        assert levels(found) == ["ok"]
        assert doctor.why_unreachable(free, 5.0) is None
    assert doctor.why_unreachable(free, 5.0) is not None


def test_own_port_faults(listener):
    with doctor.own_port(cluster_of(listener), {}) as found:
        assert levels(found) == ["fault"]
        assert "Address already in use" in found[0].text
        assert "ss -ltnp" in found[0].remedy
    # The documentation's network: no machine has an address of it.
    with doctor.own_port(cluster_of("203.0.113.7:1"), {}) as found:
        assert levels(found)[0] in ("warn", "fault")
        assert "203.0.113.7" in found[0].text
    environ = {"KERASDIST_LISTEN_FD": "3"}
    with doctor.own_port(cluster_of(listener), environ) as found:
        assert levels(found) == ["ok"]
    with doctor.own_port(Cluster(rank=0, size=1), {}) as found:
        assert found == []


def test_peers_and_servers(listener, closed):
    place = {"size": 2, "workers": (closed, "127.0.0.1:1"), "servers": (listener,)}
    worker = Cluster(rank=1, **place)
    one, two = sorted(doctor.check_peers(worker, 1.5), key=lambda f: f.text)
    assert (one.level, one.text) == (
        "fault",
        f"rank 0 ({closed}) can't be reached: connection refused: nothing listens "
        "there",
    )
    assert (two.level, two.text) == ("ok", f"server 0 ({listener}) accepts connections")
    place = {"size": 1, "workers": (listener,), "servers": ("127.0.0.1:1",)}
    server = Cluster(rank=None, task_type="ps", **place)
    (found,) = doctor.check_peers(server, 30.0)
    assert found.text == f"rank 0 ({listener}) accepts connections"


def test_a_peer_that_comes_later_is_found():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        reasons = []

        def probe(address, seconds):
            reasons.append(doctor.why_unreachable(address, seconds))
            server.listen()  # after the first look
            return reasons[-1]

        cluster = cluster_of("127.0.0.1:1", address)
        (found,) = doctor.check_peers(cluster, 20.0, probe)
        assert found.level == "ok"
        assert reasons == ["connection refused: nothing listens there", None]


def test_a_probe_that_hangs_doesnt_hang_us():
    hang = threading.Event()

    def probe(address, seconds):
        hang.wait(bound(60.0))

    cluster = cluster_of("127.0.0.1:1", "h:1", "i:1")
    found = doctor.check_peers(cluster, 0.2, probe)
    assert not hang.is_set()
    hang.set()
    assert [each.text for each in found] == [
        "rank 1 (h:1) can't be reached: no answer within 0.2 s",
        "rank 2 (i:1) can't be reached: no answer within 0.2 s",
    ]


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
    limit = tmp_path / "cpu.max"
    for text in ("max 100000", ""):
        limit.write_text(text)
        (found,) = doctor.check_cores(str(tmp_path))
        assert found.level == "ok"
    limit.write_text("50000 100000")
    (found,) = doctor.check_cores(str(tmp_path))
    assert found.level == "warn"
    assert found.text.endswith("but this container gets the time of 0.5")
    assert "TF_NUM_INTRAOP_THREADS=1" in found.remedy


def test_the_allocator():
    (found,) = doctor.check_allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2:x.so"})
    assert found.text == "memory is allocated with jemalloc (LD_PRELOAD)"
    (found,) = doctor.check_allocator({})
    library = find_allocator()
    assert found.level == "ok"
    assert ("the C library" if library is None else f"{library} is inst") in found.text
