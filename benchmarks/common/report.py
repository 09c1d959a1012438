"""What a benchmark leaves: its tables, every sample, and the environment."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.places import ROOT

__all__ = ["Report", "arguments"]

# What a run changes: its own files, which the next one of `make bench` finds.
_WRITTEN = ("benchmarks/*.txt", "benchmarks/*.json", "*.svg")
# What is at most this long in `results.json` stands on one line, in characters.
_SHORT = 300


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _versions(names: Iterable[str]) -> str:
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    sys.path.insert(0, str(ROOT))
    from kerasdist._version import __version__

    return ", ".join([f"kerasdist {__version__}", *found])


def _commit() -> str:
    """The commit; `-dirty` if more differs than what benchmarks themselves write."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    written = (f":(exclude){place}" for place in _WRITTEN)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{commit}-dirty" if changed else commit


class Report:
    """What a benchmark leaves: `output.txt` with its tables, `results.json`.

    Args:
        title: What was measured.
        folder: Where the files go.
        packages: Whose versions are told.
    """

    def __init__(
        self,
        title: str,
        folder: Path,
        packages: Sequence[str] = ("numpy", "tensorflow", "keras"),
        **notes: str,
    ) -> None:
        self.folder = folder
        self._begun = time.monotonic()
        self._text: list[str] = []
        self.data: dict[str, Any] = {
            "title": title,
            "environment": {
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python", *_shown(sys.argv)]),
                "cpu": f"{_cpu()}, {os.cpu_count()} cores",
                "system": f"{platform.system()} {platform.machine()}",
                "python": platform.python_version(),
                "packages": _versions(packages),
                "commit": _commit(),
                **notes,
                "load before": _load(),
            },
        }
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, text: str) -> None:
        """Print and keep a paragraph."""
        print(text, flush=True)
        self._text.append(text)

    def write(self) -> None:
        """Write both files."""
        env = self.data["environment"]
        env["load after"] = _load()
        env["duration"] = f"{time.monotonic() - self._begun:.0f} s"
        width = max(len(name) for name in env)
        lines = [f"{name:<{width}}  {value}" for name, value in env.items()]
        text = "\n".join([self.data["title"], "", *lines, "", *self._text])
        for line in lines:
            print(line)
        (self.folder / "output.txt").write_text(text.rstrip() + "\n")
        # Keys are text afterwards, as they are in the file.
        data = json.loads(json.dumps(self.data))
        (self.folder / "results.json").write_text(compact(data) + "\n")


def compact(data: Any, indent: str = "") -> str:
    """JSON with a list of numbers, and each value that is short, on one line."""
    text = json.dumps(data)
    inner = indent + " "
    if len(text) <= _SHORT or not isinstance(data, dict | list):
        return text
    if isinstance(data, dict):
        lines = [f"{json.dumps(key)}: {compact(data[key], inner)}" for key in data]
    elif any(isinstance(one, dict | list) for one in data):
        lines = [compact(one, inner) for one in data]
    else:
        return text
    start, end = "{}" if isinstance(data, dict) else "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{end}"


def _shown(argv: Sequence[str]) -> list[str]:
    """The command as it can be given in a checkout, without this machine's paths."""
    shown = []
    for word in argv:
        path = Path(word)
        if path.is_absolute():
            word = os.path.relpath(path, ROOT) if ROOT in path.parents else path.name
        shown.append(word)
    return shown


def _load() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def arguments(description: str, folder: Path) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=folder, help="where the result files go"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smallest sizes only: shows that the script works, not how fast it is",
    )
    return parser
