"""`kerasdist env`: everything is there, nothing secret, and it never fails."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kerasdist import __version__, cli
from kerasdist.cli import env as command
from kerasdist.cli.env import HIDDEN, hide_secrets, shown_variables
from pace import bound

PARTS = (
    *("versions", "extras", "system", "memory", "control_group", "limits", "network"),
    *("allocator", "launcher", "variables", "gpus"),
)


def test_the_text_has_all_parts(capfd, monkeypatch):
    monkeypatch.setenv("KERASDIST_SECRET", "nobody may read this")
    monkeypatch.setenv("TF_CONFIG", "")
    assert cli.main(["env", "--no-tensorflow"]) == 0
    text, errors = capfd.readouterr()
    assert errors == ""
    for name in PARTS:
        assert f"{name.replace('_', ' ')}:\n" in text
    assert f"  kerasdist: {__version__}\n" in text
    assert "  KERASDIST_SECRET: (hidden)\n" in text
    assert "  place: rank 0 of 1 (worker 0), by no settings\n" in text
    assert "  open files (ulimit -n): " in text
    assert "127.0.0.1" in text
    assert "nobody may" not in text
    assert "can't be read" not in text


def test_json_has_all_parts_also_one_that_fails(capfd, monkeypatch):
    def fail():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.setattr(command, "memory", fail)
    assert cli.main(["env", "--json", "--no-tensorflow"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert tuple(found) == ("command", "kerasdist", "ok", "error", *PARTS)
    assert (found["command"], found["ok"], found["error"]) == ("env", True, None)
    assert found["gpus"]["TensorFlow"] == "not asked (--no-tensorflow)"
    assert found["memory"]["unreadable"].startswith("PermissionError: [Errno 13] Per")
    assert found["system"]["cores of this process"] >= 1


def test_the_launcher_and_the_place():
    task = {"type": "ps", "index": 0}
    config = json.dumps({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": task})
    environ = {"KERASDIST_REPORT_FD": "4", "TF_CONFIG": config}
    assert command.report(environ, 0.0)["launcher"] == {
        "signs of": ["kerasdist run"],
        "place": "server of 1 worker (ps 0), by TF_CONFIG",
    }
    environ = {"TF_CONFIG": '{"cluster": {"worker": ["a"]}, "token": ["x1", "x2"]}'}
    found = command.report(environ, 0.0)
    assert "has no port" in found["launcher"]["place"]["unreadable"]
    assert "x1" not in json.dumps(found)


def test_limits_of_control_groups(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "pids.max").write_text("max\n")
    found = command.control_group(str(tmp_path))
    assert found == {"cores": 1.5, "memory_limit_bytes": 1000}
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text(f"{(1 << 63) - 4096}\n")
    assert command.control_group(str(tmp_path)) == {"limits": "none"}


SECRET = "s3cr3t-s3cr3t"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KERASDIST_SECRET", SECRET),
        ("TF_API_KEY", SECRET),
        ("CUDA_auth", SECRET),
        ("TF_CONFIG", json.dumps({"a": [{"tokens": [SECRET, SECRET]}]})),
        ("TF_CONFIG", f'{{"password": "two {SECRET}", broken'),
        ("TF_PROXY", f"http://user:{SECRET}@host:1"),
        ("TF_ARGS", f"--token={SECRET} --x=1"),
        ("TF_ARGS", f"--client-secret='{SECRET} more'"),
        ("TF_ARGS", f"--client-secret='not closed {SECRET} more"),
        ("OMPI_MCA_x", f"password: {SECRET}"),
    ],
)
def test_secrets_are_hidden(name, value):
    shown = shown_variables({name: value})
    assert HIDDEN in shown[name]
    assert "s3cr3t" not in shown[name]
    assert "more" not in shown[name]


def test_secrets_are_hidden_wherever_they_stand():
    environ = {"AWS_SECRET_ACCESS_KEY": SECRET, "TF_X": f"a{SECRET}b", "MY_KEY": "a"}
    assert hide_secrets(shown_variables(environ), environ) == {"TF_X": f"a{HIDDEN}b"}
    assert hide_secrets([f"/{SECRET}/b", 1], environ) == [f"/{HIDDEN}/b", 1]


def test_what_isnt_secret_is_shown():
    environ = {
        "TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}',
        "KERASDIST_PORT": "24000",
        "SLURM_JOB_ID": "7",
        "OMPI_COMM_WORLD_RANK": "0",
        "HOME": "/home/a",
        "TF_MONKEY": "banana",
    }
    shown = hide_secrets(shown_variables(environ), {**environ, "MY_KEY": "/home/a"})
    assert shown == {key: value for key, value in environ.items() if key != "HOME"}


@pytest.mark.parametrize(
    "command", [["env", "--no-tensorflow"], ["doctor", "--json", "--timeout", "0"]]
)
def test_a_reader_that_has_enough_ends_it_without_a_traceback(command):
    """`kerasdist env | head`, and documents, which are printed at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "kerasdist", *command],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=bound(60),
            text=True,
            check=False,
        )
    assert done.returncode == 128 + signal.SIGPIPE
    lines = done.stderr.splitlines()
    assert all(line.startswith(("usage: ", " ", "kerasdist ")) for line in lines)
