"""`kerasdist.predict(script)`: what `kerasdist predict` prints, as objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from kerasdist.prediction.report import from_json
from kerasdist.prediction.simulation import Prediction


def predict(
    script: str | os.PathLike[str],
    *arguments: str,
    workers: Iterable[int],
    network: str | None = None,
    options: Iterable[str] = (),
) -> dict[int, Prediction]:
    """Simulate a script's steps with other numbers of workers, see docs/sizing.md.

    Another process runs the script up to its first `fit`. Its output goes to standard
    error.

    Args:
        script: The path of a Python script.
        arguments: The script's arguments.
        workers: Numbers of workers, each of which takes as many rows as the measured
            one.
        network: Bits per second between hosts, as "10G", or with a latency, as
            "1G,2ms". None: it's measured, which needs hosts in `options`.
        options: Further options of `kerasdist predict`, as `["-H", "alpha,beta"]`.

    Returns:
        For each number of workers the seconds of a step (`step_s`, `low`, `high`),
        `examples_per_s`, the `efficiency` and the `limit`.

    Raises:
        RuntimeError: An argument is wrong, or the script failed; the text has why.
    """
    command = [sys.executable, "-m", "kerasdist", "predict", "--json", *options]
    command += ["--workers", ",".join(map(str, workers))]
    command += [] if network is None else ["--network", network]
    done = subprocess.run(
        [*command, "--", os.fspath(script), *arguments],
        stdout=subprocess.PIPE,
        check=False,
    )
    document: dict[str, Any] = json.loads(done.stdout or "{}")
    if not document.get("ok"):
        error = document.get("error") or {}
        reason = error.get("message") or f"exit code {done.returncode}"
        raise RuntimeError(
            f"kerasdist predict failed. Received: script={os.fspath(script)!r}: "
            f"{reason}."
        )
    return from_json(document)
