"""Jobs whose logs are on a disk that is full: a real one, of some kilobytes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launcher
from pace import bound

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    found = subprocess.run(mount, capture_output=True, text=True, timeout=bound(30))
    if found.returncode:
        pytest.skip(f"no disk can be mounted: {found.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=bound(30))


def test_logs_on_a_full_disk(disk: Path, launcher: Launcher) -> None:
    """The worker whose output is lost fails, with the reason; the rest is as usual."""
    script = """
    if rank == 1:
        for _ in range(1000):
            print("x" * 99, flush=True)
    hang()
    """
    options = ("-n", 2, "--log-dir", disk / "logs", "script.py")
    code, _, err = launcher.run(*options, script=script, quick=True)
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert f"the disk of {disk}/logs is full" in err
    launcher.nothing_runs()


def test_no_folder_for_temporary_files(disk: Path, launcher: Launcher) -> None:
    """What the launcher itself notes needs no disk: the error is shown."""
    full = contextlib.suppress(OSError)
    with (disk / "fill").open("wb", buffering=0) as file, full:
        while file.write(bytes(4096)):
            pass
    launcher.env["TMPDIR"] = str(disk)
    code, _, err = launcher.run(
        *("-n", 2, "script.py"),
        script='if rank:\n    raise ValueError("made")\nhang()',
        quick=True,
    )
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert "ValueError: made" in err
