"""The GPUs of a host, by a program that stands in for the driver's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kerasdist.cli.run.gpus.find import find_gpus

# The forms of the driver's output.
TWO = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
GPU 1: Tesla V100-PCIE-16GB (UUID: GPU-aaaa1111-1111-2222-3333-444455556666)
"""
PARTS = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-ead6691f-1d1e-5c4f-8c4a-0f8a6f0b0f11)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-1111-2222-3333-444455556666)
"""


def driver(folder: Path, text: str) -> dict[str, str]:
    """Return an environment with an `nvidia-smi` that runs this."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("0,2", ["0", "2"]),
        (" 1, 0 ", ["1", "0"]),
        ("GPU-5c89,MIG-ead6", ["GPU-5c89", "MIG-ead6"]),
        ("0,-1,2", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", ["1"]),
    ],
)
def test_the_variable_of_an_outer_launcher_decides(
    tmp_path: Path, given: str, names: list[str]
) -> None:
    """As CUDA reads it, and without a question to the driver."""
    environ = driver(tmp_path, "exit 3")
    assert find_gpus({**environ, "CUDA_VISIBLE_DEVICES": given}) == (names, "")


def test_the_driver_lists_gpus_and_their_parts(tmp_path: Path) -> None:
    found = find_gpus(driver(tmp_path, f"[ $1 = -L ] && cat <<'END'\n{TWO}END"))
    assert found == (
        [
            "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f",
            "GPU-aaaa1111-1111-2222-3333-444455556666",
        ],
        "",
    )
    found = find_gpus(driver(tmp_path, f"cat <<'END'\n{PARTS}END"))
    assert found == (
        [
            "MIG-ead6691f-1d1e-5c4f-8c4a-0f8a6f0b0f11",
            "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0",
            "GPU-aaaa1111-1111-2222-3333-444455556666",
        ],
        "",
    )


def test_a_host_without_the_program_has_no_gpus(tmp_path: Path) -> None:
    assert find_gpus({"PATH": str(tmp_path)}) == ([], "")


def test_a_driver_that_fails_is_said(tmp_path: Path) -> None:
    text = "echo Failed to initialize NVML: Driver/library version mismatch; exit 18"
    assert find_gpus(driver(tmp_path, text)) == (
        [],
        "nvidia-smi -L has ended with 18: Failed to initialize NVML: Driver/library "
        "version mismatch",
    )
