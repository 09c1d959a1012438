"""What the benchmarks share: processes that take orders, environment, tables, plots.

    with Driver() as driver:
        team = driver.start("tcp", lambda rank: [python, "player.py", ...], 2)
        answers = team.order({"bytes": 1024})      # one answer per rank

The processes of all columns of a table live side by side and wait, each at a socket,
until it is their turn: so all columns are measured in the same run, in turns. Only
the standard library is needed here: peers have environments of their own. Figures
are medians; times are in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "ROOT",
    "Driver",
    "Report",
    "Team",
    "arguments",
    "cluster_env",
    "fit_line",
    "free_ports",
    "human_bytes",
    "median",
    "plot",
    "quiet_env",
    "serve",
    "table",
    "timed",
]

ROOT = Path(__file__).resolve().parent.parent
# How long one order, or the start of a process, may take, in seconds.
_PATIENCE = 300.0

median = statistics.median


def human_bytes(count: float) -> str:
    """For instance `10 KB`; 1 KB is 1,000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


# Processes.


def quiet_env(threads: int | None = 1) -> dict[str, str]:
    """The environment of a process that is measured: no job around it, no GPU."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CONFIG" and not name.startswith(("KERASDIST_", "SLURM_"))
    }
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if threads is not None:
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "TF_NUM_INTRAOP_THREADS": str(threads),
            "TF_NUM_INTEROP_THREADS": "2",
        }
    return env


def cluster_env(addresses: Sequence[str], rank: int, secret: str) -> dict[str, str]:
    """The settings by which a worker of kerasdist (or TensorFlow) finds its job."""
    cluster = {"worker": list(addresses)}
    task = {"type": "worker", "index": rank}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "KERASDIST_SECRET": secret,
    }


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: for peers that can't be given a socket."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


class Team:
    """The processes of one column, by rank. Made by `Driver.start`."""

    def __init__(self, name: str, lines: dict[int, Any]) -> None:
        self.name = name
        self._lines = lines

    def order(self, order: Mapping[str, Any]) -> list[Any]:
        """Give all ranks the same order at once; return their answers by rank."""
        for line in self._lines.values():
            line.write(json.dumps(order) + "\n")
            line.flush()
        answers = []
        for rank in sorted(self._lines):
            text = self._lines[rank].readline()
            if not text:
                raise RuntimeError(f"Rank {rank} of {self.name} ended. See its output.")
            answers.append(json.loads(text))
        return answers


class Driver:
    """Starts processes and gives them orders; ends all of them on exit."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[str, Path] = {}

    def __enter__(self) -> Driver:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, "control"))
        self._socket = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._socket.bind(self.path)
        self._socket.listen(64)
        self._socket.settimeout(_PATIENCE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # First the lines: a process that reads the end of its line ends in good
        # order.
        self._stack.close()
        for process in self._processes:
            try:
                process.wait(0.5 if kind else 10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if kind is not None:
            for name, log in self._logs.items():
                if text := log.read_text(errors="replace").strip():
                    print(f"-- {name}\n{text[-3000:]}", file=sys.stderr)
        self._folder.cleanup()

    def start(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        size: int,
        env: Callable[[int], Mapping[str, str]] = lambda rank: quiet_env(),
        *,
        processes: int | None = None,
        fds: Callable[[int], Sequence[int]] = lambda rank: (),
    ) -> Team:
        """Start a column.

        Args:
            name: Of the column.
            command: Of each process; `serve(driver.path, ...)` must come of it.
            size: Number of ranks that will come.
            env: Of each process.
            processes: How many to start, if not one per rank (`mpirun`).
            fds: What each process inherits.
        """
        mine: list[subprocess.Popen[bytes]] = []
        for rank in range(size if processes is None else processes):
            label = f"{name}, process {rank}"
            log = Path(self._folder.name, f"{len(self._logs)}.log")
            self._logs[label] = log
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command(rank)),
                    env=dict(env(rank)),
                    pass_fds=fds(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            mine.append(process)
            self._processes.append(process)
        end = time.monotonic() + _PATIENCE
        lines: dict[int, Any] = {}
        while len(lines) < size:
            self._socket.settimeout(1.0)
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in mine):
                    raise RuntimeError(f"A process of {name} ended.") from None
                if time.monotonic() > end:
                    raise RuntimeError(f"{name} didn't start.") from None
                continue
            sock.settimeout(_PATIENCE)
            line = self._stack.enter_context(sock.makefile("rw"))
            self._stack.callback(sock.close)
            self._stack.callback(_shut, sock)
            lines[json.loads(line.readline())["rank"]] = line
        return Team(name, lines)

    def start_job(
        self,
        name: str,
        command: Sequence[str],
        size: int,
        env: Mapping[str, str] | None = None,
    ) -> Team:
        """Start workers of one kerasdist job on this machine."""
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
                sock.listen(64)
            addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
            secret = secrets.token_hex(32)

            def environ(rank: int) -> dict[str, str]:
                return {
                    **quiet_env(),
                    **cluster_env(addresses, rank, secret),
                    "KERASDIST_LISTEN_FD": str(sockets[rank].fileno()),
                    **(env or {}),
                }

            return self.start(
                name,
                lambda rank: command,
                size,
                environ,
                fds=lambda rank: (sockets[rank].fileno(),),
            )


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def serve(path: str, rank: int, answer: Callable[[dict[str, Any]], Any]) -> None:
    """Take orders until the driver ends.

    Args:
        path: `Driver.path`.
        rank: This process's.
        answer: From an order to its answer, JSON values.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        with sock.makefile("rw") as line:
            line.write(json.dumps({"rank": rank}) + "\n")
            line.flush()
            for text in line:
                line.write(json.dumps(answer(json.loads(text))) + "\n")
                line.flush()


# Reports.


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
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


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
        width = max(len(name) for name in env)
        lines = [f"{name:<{width}}  {value}" for name, value in env.items()]
        text = "\n".join([self.data["title"], "", *lines, "", *self._text])
        for line in lines:
            print(line)
        (self.folder / "output.txt").write_text(text.rstrip() + "\n")
        (self.folder / "results.json").write_text(json.dumps(self.data, indent=1))


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


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = [
        "-" * width if i == 0 else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines) + "\n"


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit time = alpha + beta x, with small relative errors at all sizes.

    Least squares of the relative errors, so that the smallest size counts as much
    as the largest.

    Returns:
        alpha, in seconds, and beta, in seconds per unit of x.
    """
    import numpy as np

    x, y = np.array(points, float).T
    a = np.stack([1 / y, x / y], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(a, np.ones(len(points)), rcond=None)
    return float(alpha), float(beta)


def plot(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    log: bool = True,
) -> None:
    """Draw lines through measured points, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same picture gives the same file.
    mpl.rcParams["svg.hashsalt"] = "kerasdist"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in series.items():
        style = "--" if name.startswith(("model", "bound")) else "o-"
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


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


def timed(call: Callable[[], Any], calls: int, samples: int) -> list[float]:
    """Seconds per call: `samples` times the mean over `calls` calls in a row."""
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return times
