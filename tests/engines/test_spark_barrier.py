"""examples/spark_barrier.py with the real Spark; Spark's TensorFlow distributor."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

import pytest
from environment import BIN, need_package, running

from pace import bound
from places import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

# Other processes' lines may stand in the same one.
RESULT = re.compile(r"(\d) workers: loss (\d+\.\d{6}), accuracy (\d\.\d{4})")
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


def run(*command: str | Path) -> str:
    need_package("pyspark")
    if shutil.which("java") is None:
        pytest.skip("there is no java")
    with running(
        *command,
        tag=secrets.token_hex(8),
        env={"PYSPARK_PYTHON": f"{BIN}/python", "SPARK_LOCAL_IP": "127.0.0.1"},
    ) as process:
        output, _ = process.communicate(timeout=bound(500))
    assert process.returncode == 0, output
    return output


def test_two_tasks_have_the_numbers_of_one() -> None:
    found = []
    for workers in (1, 2):
        output = run(
            *(BIN / "spark-submit", "--master", f"local[{workers}]"),
            *(ROOT / "examples" / "spark_barrier.py", "--workers", str(workers)),
            *("--epochs", "4"),
        )
        (result,) = RESULT.findall(output)
        assert result[0] == str(workers)
        found.append([float(number) for number in result[1:]])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_distributor_with_another_strategy(tmp_path: Path) -> None:
    need_package("spark_tensorflow_distributor")
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTOR)
    assert "RESULT 2 True" in run(BIN / "python", script)
