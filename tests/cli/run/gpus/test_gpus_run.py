"""`kerasdist run --gpus` with real processes, and a program in the driver's place."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from ssh import SshHosts

import kerasdist
from kerasdist.errors import ClusterError
from launching import Launcher
from pace import bound

pytestmark = pytest.mark.timeout(90)
_NO_SSH = SshHosts.available()
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
SHOW = f"""
names = {NAMES!r}
kind = config["task"]["type"]
incarnation = os.environ.get("KERASDIST_INCARNATION", "0")
found = [os.environ.get(name) for name in names]
mark(f"{{kind}}-{{rank}}-{{incarnation}}", json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _no_variable(launcher: Launcher) -> None:
    del launcher.env["CUDA_VISIBLE_DEVICES"]


def give_gpus(launcher: Launcher, count: int) -> None:
    """Put a program in the driver's place, which lists this many GPUs."""
    folder = launcher.folder / "driver"
    folder.mkdir()
    program = folder / "nvidia-smi"
    lines = "".join(f"GPU {i}: NVIDIA L4 (UUID: GPU-{i})\n" for i in range(count))
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    program.chmod(0o755)
    launcher.env["PATH"] = f"{folder}:{launcher.env['PATH']}"


def shown(launcher: Launcher, *names: str) -> list[Any]:
    return [json.loads(text) for text in launcher.wait_for(*names)]


def test_gpus_that_cannot_be_listed_are_warned_of(launcher: Launcher) -> None:
    give_gpus(launcher, 0)
    program = launcher.folder / "driver" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho no driver; exit 9\n")
    code, _, err = launcher.run("-n", 2, "script.py", script="print(rank)")
    assert code == 0
    assert "among the workers: nvidia-smi -L has ended with 9: no driver" in err
    code, _, err = launcher.run("-n", 2, "--gpus", 1, "script.py")
    assert code == 2
    assert "this host can't list its GPUs: nvidia-smi -L has ended with 9" in err


def test_workers_share_the_gpus_and_know_their_ranks(launcher: Launcher) -> None:
    """Servers have none; ranks of an outer launcher aren't those of this job.

    The GPUs are divided among the workers to which the job may grow, and one that is
    started again gets its own.
    """
    give_gpus(launcher, 3)
    launcher.env.update(RANK="7", WORLD_SIZE="9", LOCAL_RANK="3")
    script = SHOW + (
        'if (kind, rank, incarnation) == ("worker", 1, "0"):\n'
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        'wait_for("enough")\n'
    )
    options = ("--ps", 1, "--elastic", "--max-workers", 3, "--restarts", 1)
    process = launcher.start("-n", 2, *options, "script.py", script=script)
    assert shown(launcher, "worker-0-0", "worker-1-0", "worker-1-1", "ps-0-0") == [
        ["0", "0", "3", "3", "GPU-0"],
        *[["1", "1", "3", "3", "GPU-1"]] * 2,
        [None, None, None, None, "-1"],
    ]
    os.kill(process.pid, signal.SIGUSR1)
    assert shown(launcher, "worker-2-0") == [["2", "2", "3", "3", "GPU-2"]]
    (launcher.folder / "enough").touch()
    _, err = process.communicate(timeout=bound(40))
    assert process.returncode == 0, err
    assert "kerasdist run: 3 GPUs for 3 workers, 1 each\n" in err


@pytest.mark.skipif(_NO_SSH is not None, reason=str(_NO_SSH))
def test_each_host_divides_its_own(launcher: Launcher) -> None:
    launcher.env["CUDA_VISIBLE_DEVICES"] = "7"
    folder = launcher.folder / "there"
    folder.mkdir()
    with SshHosts(3) as hosts:
        # Beginning with different names.
        (folder / "nvidia-smi").write_text(
            "#!/bin/sh\n"
            f'case "$(hostname -I)" in *{hosts.address(1)}*) n=a;; *) n=b;; esac\n'
            'for i in 0 1; do echo "GPU $i: NVIDIA L4 (UUID: GPU-$n$i)"; done\n'
        )
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nPATH={folder}:$PATH exec {os.sys.executable} "$@"\n'
        )
        for program in folder.iterdir():
            program.chmod(0o755)
        launcher.prefix = hosts.prefix(0)
        names = [hosts.address(1), hosts.address(2)]
        options = ("-H", f"{names[0]}:2,{names[1]}:1", "--ssh", hosts.ssh)
        code, _, err = launcher.run(
            *options, "--python", python, "script.py", script=SHOW
        )
        assert code == 0, err
        assert shown(launcher, "worker-0-0", "worker-1-0", "worker-2-0") == [
            ["0", "0", "3", "2", "GPU-a0"],
            ["1", "1", "3", "2", "GPU-a1"],
            ["2", "0", "3", "1", "GPU-b0,GPU-b1"],
        ]
        assert (
            f"{names[0]}: 2 GPUs for 2 workers, 1 each; {names[1]}: 2 GPUs for 1 "
            "worker, 2 each"
        ) in err
        options = ("-H", f"{names[0]}:1,{names[1]}:3", "--ssh", hosts.ssh)
        code, _, err = launcher.run(*options, "--python", python, "script.py")
        assert code == 2
        assert f"{names[1]} has 2 GPUs for 3 workers" in err


def visible() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")


def test_a_function_of_a_notebook_has_the_option() -> None:
    """And GPUs of an outer launcher are divided."""
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert kerasdist.run(visible, 2, env=env, gpus=1) == [("4", "0"), ("5", "1")]
    with pytest.raises(TypeError, match=r"^`gpus` must be a text or an integer\. Rec"):
        kerasdist.run(visible, 2, gpus=True)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match=r"start the job\. this host has 1"):
        kerasdist.run(visible, 2, env={"CUDA_VISIBLE_DEVICES": "0"})
