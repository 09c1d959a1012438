import json
import os
import signal

import pytest
from ssh import SshHosts

from kerasdist.cli.run.hosts.probe import find_gpus
from kerasdist.cli.run.job_spec import divide, divide_all
from pace import bound

_NO_SSH = SshHosts.available()
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
SHOW = f"""
names = {NAMES!r}
kind = config["task"]["type"]
incarnation = os.environ.get("KERASDIST_INCARNATION", "0")
found = [os.environ.get(name) for name in names]
mark(f"{{kind}}-{{rank}}-{{incarnation}}", json.dumps(found))
"""


@pytest.fixture
def launcher(launcher):
    del launcher.env["CUDA_VISIBLE_DEVICES"]
    return launcher


def driver(folder, text):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def shown(launcher, *names):
    return [json.loads(text) for text in launcher.wait_for(*names)]


def test_gpus_that_cannot_be_listed_are_warned_of(launcher):
    launcher.env |= driver(launcher.folder, "echo no driver; exit 9")
    code, _, err = launcher.run("-n", 2, "script.py", script="print(rank)")
    assert code == 0
    assert "among the workers: nvidia-smi -L has ended with 9: no driver" in err
    code, _, err = launcher.run("-n", 2, "--gpus", 1, "script.py")
    assert code == 2
    assert "this host can't list its GPUs: nvidia-smi -L has ended with 9" in err


def test_workers_share_the_gpus_and_know_their_ranks(launcher):
    """Servers have none; ranks of an outer launcher aren't those of this job.

    The GPUs are divided among the workers to which the job may grow, and one that is
    started again gets its own.
    """
    lines = "".join(f"GPU {i}: NVIDIA L4 (UUID: GPU-{i})\n" for i in range(3))
    launcher.env |= driver(launcher.folder, f"cat <<'END'\n{lines}END")
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
def test_each_host_divides_its_own(launcher):
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


# The forms of the driver's output.
LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-ead6691f-1d1e-5c4f-8c4a-0f8a6f0b0f11)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0)
GPU 1: Tesla V100-PCIE-16GB (UUID: GPU-aaaa1111-1111-2222-3333-444455556666)
"""


def test_the_variable_of_an_outer_launcher_decides(tmp_path):
    """As CUDA reads it, and without a question to the driver."""
    environ = driver(tmp_path, "exit 3")
    for given, names in {
        " 1, 0 ": ["1", "0"],
        "GPU-5c89,MIG-ead6": ["GPU-5c89", "MIG-ead6"],
        "0,-1,2": ["0"],
        "": [],
        "NoDevFiles": [],
        "1,1": ["1"],
    }.items():
        assert find_gpus({**environ, "CUDA_VISIBLE_DEVICES": given}) == (names, "")


def test_the_driver_lists_gpus_and_their_parts(tmp_path):
    assert find_gpus({"PATH": str(tmp_path)}) == ([], "")
    found = find_gpus(driver(tmp_path, f"[ $1 = -L ] && cat <<'END'\n{LISTED}END"))
    assert found[0] == [
        "MIG-ead6691f-1d1e-5c4f-8c4a-0f8a6f0b0f11",
        "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0",
        "GPU-aaaa1111-1111-2222-3333-444455556666",
    ]
    text = "Failed to initialize NVML: Driver/library version mismatch"
    found = find_gpus(driver(tmp_path, f"echo {text}; exit 18"))
    assert found == ([], f"nvidia-smi -L has ended with 18: {text}")


NAMES = [f"GPU-{i}" for i in range(8)]


def test_without_gpus_or_with_all_nothing_is_set():
    assert divide("auto", [], 2, []) is divide("all", NAMES, 2, []) is None


def test_a_worker_gets_one_part_of_a_gpu(said):
    """CUDA gives a process only one."""
    parts = [f"MIG-{i}" for i in range(4)]
    divided = divide_all("auto", {"": (parts, "")}, {"": 2}, [])
    assert divided == {"": (("MIG-0",), ("MIG-1",))}
    assert said() == ["kerasdist run: 4 GPUs for 2 workers, 1 each; 2 not used"]
    faults: list[str] = []
    divide("2", parts, 2, faults)
    assert faults == [
        "this host has parts of GPUs (MIG), of which CUDA gives a process only one. "
        "Received: --gpus 2. Expected --gpus 1 or --gpus auto"
    ]


def test_equal_hosts_are_said_together(said):
    given = {"a": (4, 2), "b": (4, 2), "c": (1, 1), "d": (0, 2), "e": (3, 2)}
    found = {host: (NAMES[:n], "") for host, (n, _) in given.items()}
    divide_all("auto", found, {host: count for host, (_, count) in given.items()}, [])
    assert said() == [
        "kerasdist run: a, b: 4 GPUs for 2 workers, 2 each; c: 1 GPU for 1 worker, "
        "1 each; e: 3 GPUs for 2 workers, 1 or 2 each"
    ]
