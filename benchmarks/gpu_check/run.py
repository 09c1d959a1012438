"""What kerasdist does on the GPUs of this machine, beside MirroredStrategy.

    make gpu-check

Bandwidth of an all-reduce, and examples per second of `fit` of a dense and a
convolutional network, with 1 to all GPUs: plain Keras, `MirroredStrategy`, one worker
with all of them, one worker for each, and these with NCCL between them. Each cell is a
job of its own that `kerasdist run` starts, which gives each worker its GPUs. A batch
has the same rows per GPU everywhere. The table is made to be sent to the authors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import ROOT, Report, arguments, quiet_env, table

PLAYER = str(HERE / "player.py")
# Seconds for one job.
_PATIENCE = 900


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and all of them."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


def ways(count: int) -> list[tuple[str, list[str], int]]:
    """What is measured with this many devices: a name, options, number of workers."""
    if count == 1:
        return [
            ("plain Keras", ["--way", "plain"], 1),
            ("RingStrategy, 1 worker", ["--way", "ring"], 1),
        ]
    return [
        ("MirroredStrategy", ["--way", "mirrored"], 1),
        ("RingStrategy, 1 worker", ["--way", "ring"], 1),
        (f"RingStrategy, {count} workers, host memory", ["--way", "ring"], count),
        (
            f"RingStrategy, {count} workers, transport='native'",
            ["--way", "ring", "--transport", "native"],
            count,
        ),
    ]


def play(
    devices: str, count: int, options: list[str], workers: int, quick: bool
) -> dict[str, Any]:
    """Run one job; return its figures, or why there are none."""
    each = count // workers
    environ = quiet_env(None if devices == "gpu" else 1)
    # The word for servers that no secret protects: they listen on loopback addresses.
    environ["KERASDIST_ALLOW_OPEN_SERVERS"] = "1"
    if devices == "gpu":
        del environ["CUDA_VISIBLE_DEVICES"]
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    command = [
        *(sys.executable, "-m", "kerasdist", "run", "-n", str(workers)),
        *("--gpus", str(each) if devices == "gpu" else "none"),
        *(PLAYER, "--devices", devices, "--replicas", str(each)),
        *("--workers", str(workers), *options, *(["--quick"] if quick else [])),
    ]
    try:
        done = subprocess.run(
            command,
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {_PATIENCE} s"}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": said[-1] if said else f"exit code {done.returncode}"}
    return dict(json.loads(results[-1].partition(" ")[2]))


def row(
    name: str, count: int, found: dict[str, Any], base: dict[str, Any]
) -> list[str]:
    """One line of the table."""
    if "error" in found:
        return [name, str(count), "failed", "failed", "failed"]
    speed = found.get("bandwidth")
    cells = [name, str(count), "" if speed is None else f"{speed / 1e9:.2f} GB/s"]
    for model in ("mlp", "conv"):
        rate = found[model]["examples/s"]
        alone = base.get(model, {}).get("examples/s")
        part = "" if not alone else f" ({rate / alone / count:.2f})"
        compiled = " jit" if found[model]["jit_compile"] else ""
        cells.append(f"{rate:,.0f}{part}{compiled}")
    return cells


def main() -> int:
    """Measure, print and write the table."""
    parser = arguments(__doc__, HERE)
    parser.add_argument(
        "--devices",
        choices=("gpu", "cpu"),
        default="gpu",
        help="'cpu': the same code on parts of the CPU, small, to show that it works",
    )
    parser.add_argument(
        "--most",
        type=int,
        help="the largest number of devices (default: all; 2 of CPU)",
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from kerasdist.cli.run.hosts.probe import find_gpus

    most = 2
    if options.devices == "gpu":
        names, reason = find_gpus(os.environ)
        if not names:
            print(
                "There is no GPU here"
                + (f": {reason}" if reason else "")
                + ". Received: --devices gpu. Expected at least one that nvidia-smi "
                "lists; `make gpu-check DEVICES=cpu` runs the same code without.",
                file=sys.stderr,
            )
            return 1
        most = len(names)
    most = min(most, options.most or most)
    what = "GPUs" if options.devices == "gpu" else "parts of a CPU"
    report = Report(
        f"kerasdist on {most} {what}",
        options.output,
        ("numpy", "tensorflow", "keras", "nvidia-nccl-cu12"),
    )
    rows, errors, base, results = [], [], {}, {}
    for count in counts(most):
        for name, way, workers in ways(count):
            found = play(options.devices, count, way, workers, options.quick)
            if name == "plain Keras":
                base = found
            if "error" in found:
                errors.append(f"{name}, {count}: {found['error']}")
            for fact in ("gpu", "cuda"):
                if fact in found:
                    report.data["environment"][fact] = found[fact]
            results[f"{name}, {count}"] = found
            rows.append(row(name, count, found, base))
            print(" | ".join(rows[-1]), flush=True)
    report.data["results"] = results
    report.add(
        table(
            ["way", "devices", "all-reduce", "MLP, examples/s", "conv, examples/s"],
            rows,
        )
    )
    report.add(
        "All-reduce: bytes of one replica's tensor by seconds. In parentheses: "
        "examples/s by those of plain Keras on one device times the number of "
        "devices.\n"
    )
    for text in errors:
        report.add(f"failed: {text}\n")
    report.write()
    print(f"\nPlease send {options.output / 'output.txt'} to the authors, as an issue.")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
