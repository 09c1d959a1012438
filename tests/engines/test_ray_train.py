"""examples/ray_train.py with the real Ray: the numbers of one process; a lost one."""

from __future__ import annotations

import os
import re
import secrets
import signal
from pathlib import Path

import pytest
from environment import BIN, need_package, running

from pace import bound
from places import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

RECIPE = ROOT / "examples" / "ray_train.py"
# Other processes' lines may stand in the same one.
RESULT = re.compile(r"(\d) workers: loss (\d+\.\d{6}), accuracy (\d\.\d{4})")
# A line of each report of a worker, with its process and rank.
REPORT = re.compile(r"pid=(\d+).*Reporting training result (\d+): .* from rank (\d)")


def run(folder: Path, workers: int, *, kill_rank: int | None = None) -> tuple[str, int]:
    """Return the output, and which of its reports was the last of the killed worker."""
    need_package("ray")
    killed = 0
    lines = []
    with running(
        *(BIN / "python", RECIPE, "--epochs", "6", "--workers", str(workers)),
        *("--storage", folder / "storage"),
        tag=secrets.token_hex(8),
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
    output, _ = run(tmp_path_factory.mktemp("alone"), 1)
    found = RESULT.findall(output)
    assert len(found) == 1, output
    _, loss, accuracy = found[0]
    return float(loss), float(accuracy)


@pytest.mark.parametrize("kill_rank", [None, 1])
def test_two_workers_have_the_numbers_of_one(
    alone: tuple[float, float], tmp_path: Path, kill_rank: int | None
) -> None:
    output, killed = run(tmp_path, 2, kill_rank=kill_rank)
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
