"""A real Slurm on one machine: a controller and nodes with addresses of their own.

    with Slurm(2, folder) as slurm:
        job = slurm.submit("job.sbatch", cwd=folder)
        assert slurm.wait(job, "COMPLETED").output == "..."

Each daemon runs on a host of `hosts.py`. Needs Debian's packages slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts import Hosts
from pace import bound
from waiting import wait_until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


class Slurm(Hosts):
    """Nodes `node1`, `node2`, ..., of 16 cores each, and a controller.

    On exit, also after a failure, every daemon and job is killed.
    """

    def __init__(self, nodes: int, folder: Path) -> None:
        super().__init__(nodes + 1)
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def available() -> str | None:
        missing = [name for name in _PROGRAMS if not shutil.which(name, path=_PATH)]
        if missing:
            return f"Slurm isn't installed: {', '.join(missing)} not found"
        return Hosts.available()

    def __enter__(self) -> Slurm:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        nodes = [f"node{i}" for i in range(1, len(self.names))]
        text = "127.0.0.1 localhost\n" + "".join(
            f"{self.address(i)} {node}\n" for i, node in enumerate(nodes, 1)
        )
        for name in self.names:
            # `ip netns exec` shows it as /etc/hosts.
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(text)
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                address=self.address(0),
                folder=self.folder,
                nodes="\n".join(
                    f"NodeName={node} NodeAddr={self.address(i)} CPUs=16"
                    for i, node in enumerate(nodes, 1)
                ),
            )
        )
        # No plugin uses cgroups, and these hosts have none mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        self._daemon(
            *("munged", "--foreground", "--force"),
            *(f"--{option}={self.folder}/munge.{end}" for option, end in files.items()),
        )
        wait_until((self.folder / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "-D", host=0)
        for i, node in enumerate(nodes, 1):
            self._daemon("slurmd", "-D", "-N", node, host=i)
        wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%T %D") == f"idle {len(nodes)}\n",
            "idle nodes",
        )

    def _daemon(self, *command: str, host: int | None = None) -> None:
        program = shutil.which(command[0], path=_PATH) or command[0]
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [
                        *([] if host is None else self.prefix(host)),
                        program,
                        *command[1:],
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"},
                )
            )

    def run(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] = {}
    ) -> str:
        done = subprocess.run(
            [*self.prefix(0), *command],
            cwd=cwd,
            env={**os.environ, **env, "SLURM_CONF": f"{self.folder}/slurm.conf"},
            capture_output=True,
            text=True,
            timeout=bound(60),
            check=False,
        )
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def submit(
        self,
        *arguments: str | Path,
        cwd: Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},
    ) -> str:
        text = self.run(
            "sbatch", "--parsable", *options, *map(str, arguments), cwd=cwd, env=env
        )
        if not re.fullmatch(r"\d+\n", text):
            raise OSError(f"sbatch failed: {text}{self.logs()}")
        return text.strip()

    def show(self, job: str) -> dict[str, str]:
        return dict(
            pair.partition("=")[::2]
            for pair in self.run("scontrol", "show", "job", "-o", job).split()
        )

    def wait(self, job: str, state: str = "COMPLETED", within: float = 150.0) -> None:
        def there() -> bool:
            now = self.show(job).get("JobState", "")
            if now in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED") and now != state:
                raise OSError(f"job {job} is {now}, not {state}")
            return now == state

        wait_until(there, f"job {job} to be {state}", within)

    def logs(self) -> str:
        return "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}\n"
            for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        super().close()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(bound(20.0))
        for name in self.names:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(Path("/etc/netns") / name)
