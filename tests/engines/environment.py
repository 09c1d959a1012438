"""The interpreter of `make engines`, and how recipes are run by it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from places import ROOT
from workers import TAG, kill_tagged, python_env

__all__ = ["BIN", "need_package", "running"]

BIN = ROOT / ".venv-engines" / "bin"


def need_package(name: str) -> None:
    """Skip the test if the environment of `make engines` doesn't have a package."""
    found = list(BIN.parent.glob(f"lib/python3*/site-packages/{name}/__init__.py"))
    if not found:
        pytest.skip(f"{name} isn't installed (make engines)")


@contextmanager
def running(
    *command: str | Path, tag: str, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in that environment; whatever it has started ends with it.

    Its processes are known by the tag, which is of this test alone.
    """
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=python_env({"PATH": path, TAG: tag, **env}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
            kill_tagged(tag)
