"""What a collective costs inside of a graph, by its parts.

    make bench-graph-ops

Two workers, each bound to one core, call graphs with 1 and with 11 collectives after
each other. The ways take turns. "Compiled" is `op.cc`, which g++ makes first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Driver, Report, arguments, human_bytes, median, quiet_env, table

WAYS = {
    "nothing": "nothing",
    "python": "`tf.numpy_function` of nothing",
    "barrier": "and a barrier",
    "kerasdist": "kerasdist's all-reduce",
    "compiled": "an operation of TensorFlow's own",
}
MORE = 10


def build(folder: Path) -> str:
    """Compile the operation for the TensorFlow that is installed; return its file."""
    code = (
        "from tensorflow import sysconfig as s; "
        "print(*s.get_compile_flags()); print(*s.get_link_flags())"
    )
    command = [sys.executable, "-c", code]
    env = quiet_env()
    shown = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    compiling, linking = (line.split() for line in shown.stdout.splitlines())
    library = folder / "op.so"
    made = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", *compiling]
    subprocess.run([*made, HERE / "op.cc", "-o", library, *linking], check=True)
    return str(library)


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    sizes = [1_000] if options.quick else [1_000, 68_000]
    samples: dict[str, list[float]] = {}
    report = Report(
        "Microseconds of a call of a graph with collectives",
        options.output,
        repeats=f"{rounds} rounds of 50 calls",
    )
    with tempfile.TemporaryDirectory() as folder, Driver() as driver:
        command = [sys.executable, str(HERE / "player.py"), driver.path]
        team = driver.start_job("player", [*command, build(Path(folder))], 2)
        for _ in range(rounds):
            for size in sizes:
                for way in WAYS:
                    for count in (1, 1 + MORE):
                        order = {"way": way, "count": count, "bytes": size}
                        taken = team.order({**order, "calls": 50})
                        key = f"{way}, {count}, {size}"
                        samples.setdefault(key, []).append(max(t[0] for t in taken))
    report.data["samples"] = samples
    found = {key: median(each) * 1e6 for key, each in samples.items()}
    for size in sizes:
        rows = []
        for way, title in WAYS.items():
            one, more = (found[f"{way}, {n}, {size}"] for n in (1, 1 + MORE))
            nothing = found[f"nothing, 1, {size}"]
            cells = [one, one - nothing, (more - one) / MORE]
            rows.append([title, *(f"{cell:.0f}" for cell in cells)])
        heads = [human_bytes(size), "a call with one", "over nothing", "each further"]
        report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
