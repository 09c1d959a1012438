"""The GPUs of a host, and their division among its workers, without processes."""

from __future__ import annotations

from pathlib import Path

from kerasdist.cli.run.hosts.find_gpus import find_gpus
from kerasdist.cli.run.job_spec import Division, divide, divisions_in_words

# The forms of the driver's output.
LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-ead6691f-1d1e-5c4f-8c4a-0f8a6f0b0f11)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0)
GPU 1: Tesla V100-PCIE-16GB (UUID: GPU-aaaa1111-1111-2222-3333-444455556666)
"""


def driver(folder: Path, text: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_the_variable_of_an_outer_launcher_decides(tmp_path: Path) -> None:
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


def test_the_driver_lists_gpus_and_their_parts(tmp_path: Path) -> None:
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


def sizes(option: str, gpus: int, workers: int) -> list[int]:
    faults: list[str] = []
    shares = divide(option, NAMES[:gpus], workers, faults).shares
    assert not faults
    assert shares is not None
    given = [name for share in shares for name in share]
    assert given == NAMES[: len(given)]
    return [len(share) for share in shares]


def test_shares_are_disjoint_and_nearly_equal() -> None:
    assert sizes("auto", 8, 4) == [2, 2, 2, 2]
    assert sizes("auto", 3, 2) == [1, 2]
    assert sizes("2", 8, 3) == [2, 2, 2]
    assert sizes("none", 4, 2) == [0, 0]
    assert sizes("0", 4, 2) == [0, 0]
    division = divide("auto", NAMES[:3], 2, [])
    assert division.environ(1) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert division.environ(None) == {"CUDA_VISIBLE_DEVICES": "-1"}  # a server


def test_without_gpus_or_with_all_nothing_is_set() -> None:
    for option, names in (("auto", []), ("all", NAMES)):
        division = divide(option, names, 2, [])
        assert division.environ(0) == division.environ(None) == {}
        assert not divisions_in_words([division])


def test_a_worker_gets_one_part_of_a_gpu() -> None:
    """CUDA gives a process only one."""
    parts = [f"MIG-{i}" for i in range(4)]
    division = divide("auto", parts, 2, [])
    assert division.shares == (("MIG-0",), ("MIG-1",))
    assert divisions_in_words([division]) == "4 GPUs for 2 workers, 1 each; 2 not used"
    faults: list[str] = []
    divide("2", parts, 2, faults)
    assert faults == [
        "this host has parts of GPUs (MIG), of which CUDA gives a process only one. "
        "Received: --gpus 2. Expected --gpus 1 or --gpus auto"
    ]


def test_equal_hosts_are_said_together() -> None:
    def of(host: str, gpus: int, workers: int) -> Division:
        return divide("auto", NAMES[:gpus], workers, [], host)

    assert divisions_in_words(
        [of("a", 4, 2), of("b", 4, 2), of("c", 1, 1), of("d", 0, 2)]
    ) == ("a, b: 4 GPUs for 2 workers, 2 each; c: 1 GPU for 1 worker, 1 each")
    assert divisions_in_words([of("", 3, 2)]) == "3 GPUs for 2 workers, 1 or 2 each"
