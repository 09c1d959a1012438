"""The wheel, built from what is tracked, and installed."""

from __future__ import annotations

import shutil
import sys
import tarfile

import pytest
from wheels import VERSION, install, run

from places import ROOT


@pytest.fixture(scope="session")
def tracked():
    """The paths of the repository's files, as text."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know what belongs to the repository")
    # A checkout of somebody else's is refused by git unless told otherwise.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    return [path for path in run(*command, cwd=ROOT).split("\0") if path]


@pytest.fixture(scope="session")
def source(tracked, tmp_path_factory):
    """A copy of what is tracked, and of nothing else."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def dist(source, tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # No isolation: setuptools is installed with the test extra, and pinned.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    run(*build, "--sdist", cwd=source)
    with tarfile.open(folder / f"kerasdist-{VERSION}.tar.gz") as archive:
        unpacked = tmp_path_factory.mktemp("unpacked")
        archive.extractall(unpacked, filter="data")
    run(*build, "--wheel", cwd=unpacked / f"kerasdist-{VERSION}")
    return folder


@pytest.fixture(scope="session")
def wheel(dist):
    return dist / f"kerasdist-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The bin folder of a virtual environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv")
    return install(folder, str(wheel), cwd=folder)
