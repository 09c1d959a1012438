"""examples/Dockerfile, where Docker is."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pace import bound
from places import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def docker(*arguments: str) -> str:
    command, kept = ["docker", *arguments], subprocess.STDOUT
    options = {"cwd": ROOT, "timeout": bound(1500), "text": True}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=kept, check=True, **options
    ).stdout


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
