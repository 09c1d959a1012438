"""`kerasdist.run(hosts=...)`: real `sshd`s on hosts with addresses of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ssh import SshHosts

from launching import Launcher
from pace import bound

_WHY_NOT = SshHosts.available()
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

SCRIPT = """
import json, os, subprocess, sys, time
import kerasdist

HOSTS, SSH = sys.argv[1:]
def function(data, fail=False):
    config = json.loads(os.environ["TF_CONFIG"])
    rank = config["task"]["index"]
    address = config["cluster"]["worker"][rank].rpartition(":")[0]
    mine = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout
    print(f"I am {rank}")
    if fail and rank == 1:
        raise LookupError("made there")
    if fail:
        time.sleep(1000)
    return rank, address in mine, data[::-1], os.environ["MINE"], os.getcwd()

# More than a pipe holds, and not a multiple of what is read at once.
data = os.urandom(3_000_001)
found = kerasdist.run(
    function, args=(data,), hosts=HOSTS.split(), ssh=SSH, env={"MINE": "yes"}
)
right = [(rank, True, data[::-1], "yes", os.getcwd()) for rank in range(2)]
print("results", found == right)
try:
    kerasdist.run(function, args=(b"", True), hosts=HOSTS.split(), ssh=SSH)
except kerasdist.errors.FunctionError as error:
    shown = 'raise LookupError("made there")' in str(error)
    print(error.rank, repr(error.__cause__), shown)
"""


def test_a_function_runs_on_hosts(launcher: Launcher) -> None:
    """The function and its results travel through ssh; no file is shared for them."""
    with SshHosts(2) as hosts:
        (launcher.folder / "script.py").write_text(SCRIPT)
        addresses = f"{hosts.address(0)} {hosts.address(1)}"
        done = subprocess.run(
            [*hosts.prefix(0), sys.executable, "script.py", addresses, hosts.ssh],
            cwd=launcher.folder,
            env=launcher.env,
            capture_output=True,
            text=True,
            timeout=bound(90),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        launcher.nothing_runs()
    assert done.stdout.splitlines() == [
        *("I am 0", "results True", "I am 0", "1 LookupError('made there') True"),
    ]
    # Logs of the failed job alone.
    assert len(launcher.temporary()) == 1
