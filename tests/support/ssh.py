"""Hosts on one machine that real `sshd`s let each other in; see `hosts.py`.

with SshHosts(3) as hosts:
    subprocess.run([*hosts.prefix(0), *shlex.split(hosts.ssh), hosts.address(1), "id"])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hosts import Hosts
from pace import bound
from waiting import wait_until

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class SshHosts(Hosts):
    """`Hosts` on each of which `sshd` listens, for this user's new key alone."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._undo = contextlib.ExitStack()
        self.ssh = ""
        self._servers: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def available() -> str | None:
        if _SSHD is None or shutil.which("ssh") is None:
            return "sshd or ssh isn't installed"
        return Hosts.available()

    def __enter__(self) -> SshHosts:
        folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        self.folder = folder
        for name in ("key", "host"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True,
                timeout=bound(30),
            )
        self.ssh = (
            f"ssh -F none -i {folder}/key -o IdentitiesOnly=yes -o "
            "StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
        super().__enter__()
        try:
            Path("/run/sshd").mkdir(exist_ok=True)
            for host in range(len(self.names)):
                self._serve(host)
        except BaseException:
            self.close()
            raise
        return self

    def _serve(self, host: int) -> None:
        options = {
            "AuthorizedKeysFile": f"{self.folder}/key.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "MaxStartups": "100",
        }
        settings = [f"-o{name}={value}" for name, value in options.items()]
        server = subprocess.Popen(
            [
                *(*self.prefix(host), str(_SSHD), "-D", "-e", "-f", "/dev/null"),
                *("-h", f"{self.folder}/host", *settings),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._servers.append(server)
        probe = [*self.prefix(host), "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"]
        wait_until(
            lambda: (
                subprocess.run(
                    probe, stderr=subprocess.DEVNULL, check=False, timeout=bound(30)
                ).returncode
                == 0
            ),
            "sshd",
        )

    def close(self) -> None:
        super().close()
        for server in self._servers:
            server.kill()
            server.wait(bound(10.0))
        self._undo.close()
