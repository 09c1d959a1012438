"""examples/ray_train.py and spark_barrier.py with the real Ray and Spark.

They have the numbers of one process, also after a loss. By the interpreter of
`make engines`.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pace import bound
from places import ROOT
from workers import TAG, kill_tagged, python_env

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

BIN = ROOT / ".venv-engines" / "bin"


def need_package(name: str) -> None:
    found = list(BIN.parent.glob(f"lib/python3*/site-packages/{name}/__init__.py"))
    if not found:
        pytest.skip(f"{name} isn't installed (make engines)")


@contextmanager
def running(
    *command: str | Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    tag = secrets.token_hex(8)
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


# Other processes' lines may stand in the same one.
RESULT = re.compile(r"(\d) workers: loss (\d+\.\d{6}), accuracy (\d\.\d{4})")
# A line of each report of a worker, with its process and rank.
REPORT = re.compile(r"pid=(\d+).*Reporting training result (\d+): .* from rank (\d)")


def run_ray(
    folder: Path, workers: int, *, kill_rank: int | None = None
) -> tuple[str, int]:
    """Return the output, and which of its reports was the last of the killed worker."""
    need_package("ray")
    killed = 0
    lines = []
    with running(
        *(BIN / "python", ROOT / "examples" / "ray_train.py", "--epochs", "6"),
        *("--workers", str(workers), "--storage", folder / "storage"),
        env={"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            match = REPORT.search(line)
            if match and kill_rank == int(match[3]) and int(match[2]) == 3:
                if not killed:
                    os.kill(int(match[1]), signal.SIGKILL)
                killed = int(match[2])
        assert process.wait(bound(120)) == 0, "".join(lines)
    return "".join(lines), killed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    output, _ = run_ray(tmp_path_factory.mktemp("alone"), 1)
    found = RESULT.findall(output)
    assert len(found) == 1, output
    _, loss, accuracy = found[0]
    return float(loss), float(accuracy)


@pytest.mark.parametrize("kill_rank", [None, 1])
def test_ray(alone: tuple[float, float], tmp_path: Path, kill_rank: int | None) -> None:
    output, killed = run_ray(tmp_path, 2, kill_rank=kill_rank)
    found = RESULT.findall(output)
    assert len(found) == 1, output
    workers, loss, accuracy = found[0]
    assert workers == "2"
    # A `fit` that was interrupted goes on with other orders of the rows.
    exact = kill_rank is None
    assert float(loss) == pytest.approx(alone[0], rel=1e-4 if exact else 0.1)
    assert float(accuracy) == pytest.approx(alone[1], abs=1e-3 if exact else 0.03)
    (path,) = re.findall(r"the model is in ([\w./-]+)", output)
    assert (Path(path) / "digits.keras").is_file()
    epochs = [int(found) for found in re.findall(r"'epoch': (\d+)", output)]
    assert max(epochs) == 5
    if kill_rank is None:
        assert not killed
        return
    assert killed
    # It went on where it was: the first epoch wasn't trained again.
    assert epochs.count(0) == 2


# What a page of the distributor shows, with this strategy in the place of TensorFlow's.
DISTRIBUTOR = """
import secrets
import pyspark.sql
from spark_tensorflow_distributor import MirroredStrategyRunner

secret = secrets.token_hex(32)

def train():
    import os
    os.environ["KERASDIST_SECRET"] = secret
    import keras
    import numpy as np
    import kerasdist

    strategy = kerasdist.RingStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=32, epochs=3, verbose=0)
    return strategy.size, history.history["loss"]

pyspark.sql.SparkSession.builder.master("local[2]").getOrCreate()
runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
size, losses = runner.run(train)
print("RESULT", size, losses[0] > losses[-1])
"""


def run_spark(*command: str | Path) -> str:
    need_package("pyspark")
    if shutil.which("java") is None:
        pytest.skip("there is no java")
    with running(
        *command, env={"PYSPARK_PYTHON": f"{BIN}/python", "SPARK_LOCAL_IP": "127.0.0.1"}
    ) as process:
        output, _ = process.communicate(timeout=bound(500))
    assert process.returncode == 0, output
    return output


def test_spark() -> None:
    found = []
    for workers in (1, 2):
        output = run_spark(
            *(BIN / "spark-submit", "--master", f"local[{workers}]"),
            *(ROOT / "examples" / "spark_barrier.py", "--workers", str(workers)),
            *("--epochs", "4"),
        )
        (result,) = RESULT.findall(output)
        assert result[0] == str(workers)
        found.append([float(number) for number in result[1:]])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_sparks_distributor(tmp_path: Path) -> None:
    need_package("spark_tensorflow_distributor")
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTOR)
    assert "RESULT 2 True" in run_spark(BIN / "python", script)
