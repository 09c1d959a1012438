"""The command line as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pace import bound


@pytest.mark.parametrize(
    "command",
    [
        ["env", "--no-tensorflow"],
        ["doctor", "--json", "--timeout", "0"],
    ],
)
def test_a_reader_that_has_enough_ends_it_without_a_traceback(
    command: list[str],
) -> None:
    """`kerasdist env | head`, and documents, which are printed at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "kerasdist", *command],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=bound(60),
            text=True,
            check=False,
        )
    assert done.returncode == 128 + signal.SIGPIPE
    lines = done.stderr.splitlines()
    assert all(line.startswith(("usage: ", " ", "kerasdist ")) for line in lines)
