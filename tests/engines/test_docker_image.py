"""examples/Dockerfile, where Docker is."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pace import bound
from places import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def docker(*arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=bound(1500),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_image_trains() -> None:
    if shutil.which("docker") is None:
        pytest.skip("Docker isn't installed")
    engine = ["docker", "info"]
    if subprocess.run(engine, capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    image = docker("build", "-q", "-f", "examples/Dockerfile", ".").strip()
    try:
        output = docker("run", "--rm", "--init", image)
    finally:
        docker("rmi", "-f", image)
    assert "weights bit-equal on all workers: True" in output
