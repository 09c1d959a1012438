import itertools
import json

import pytest
from scripts import ELASTIC, with_prelude

from board import Board, series, text
from pace import bound
from workers import Workers

pytestmark = pytest.mark.soak

SCRIPT = with_prelude(
    ELASTIC
    + """
class End(keras.callbacks.Callback):
    step = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.step += 1
        if self.step == {0: 11, 1: 18}.get(me):
            os.kill(os.getpid(), signal.SIGKILL)

rate = kerasdist.callbacks.ScaleLearningRate(warmup_epochs=1, base_batch_size=8)
board = kerasdist.callbacks.ScalingTensorBoard("logs", baseline=1000.0, update_freq=4)
model.fit(
    x, y, batch_size=16, epochs=5, verbose=0, shuffle=False,
    callbacks=[
        kerasdist.callbacks.BroadcastInitialState(), rate, board,
        kerasdist.callbacks.Timeline("trace.json", steps=(8, 14)), End()])
result({
    "steps": int(model.optimizer.iterations), "factor": rate.factor,
    "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
    "workers": board.figures and board.figures.workers})
strategy.close()
"""
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    with Workers(SCRIPT, 3, env={"FOLDER": str(folder)}, deadline=150) as job:
        finished = job.wait()
    assert [each.returncode for each in finished] == [-9, -9, 0], finished[2].output
    return folder, finished[2]


def test_the_rate_stays(job):
    found = job[1].result
    assert found["steps"] == 30
    assert found["factor"] == 2.0
    assert found["rate"] == pytest.approx(1.0)


def test_the_board_shows_the_workers(job):
    folder, last = job
    run = folder / "logs" / "scaling"
    assert len(list(run.glob("*.tfevents.*"))) == 3
    board = Board(run)
    workers = [(step, int(value)) for step, value in series(board, "job/workers")]
    assert workers == sorted(workers, key=lambda each: each[0])
    changes = [
        (before, after)
        for before, after in itertools.pairwise(workers)
        if before[1] != after[1]
    ]
    # The last step of the former workers, and the first one of those that are left.
    assert changes == [((10, 3), (11, 2)), ((17, 2), (18, 1))]
    assert workers[-1] == (30, 1)
    pauses = series(board, "job/pause_seconds")
    assert [step for step, _ in pauses] == [11, 18]
    assert all(0 < seconds < bound(30) for _, seconds in pauses)
    goodput = [value for _, value in series(board, "job/goodput_percent")]
    assert goodput[0] == 100
    assert all(0 < value < 100 for value in goodput[-3:])
    lost = [words for words in text(board, "events") if "was lost at step" in words]
    assert ["rank 0 (" in words for words in lost] == [True, False]
    # With as many workers as there are.
    assert last.result["workers"] == 1
    assert "how this job scales" in last.output
    speeds = dict(series(board, "examples_per_second/all"))
    for step, percent in series(board, "efficiency/percent"):
        count = dict(workers)[step]
        assert percent == pytest.approx(speeds[step] / (1000 * count) * 100, rel=1e-3)


def test_the_timeline_is_of_those_that_are_left(job):
    folder, _ = job
    found = json.loads((folder / "trace.json").read_text())
    errors = found["otherData"]["clock_error_us"]
    assert sorted(errors) == ["0", "1"]
    assert all(error < 1e6 for error in errors.values())
    steps = [e for e in found["traceEvents"] if e["name"].startswith("step ")]
    names = [f"step {number}" for number in range(8, 14)]
    assert sorted(e["name"] for e in steps) == sorted(names * 2)
    # The step that was begun again lasts longest: it has the change in it.
    assert all(
        e["name"] == "step 10" for e in sorted(steps, key=lambda e: e["dur"])[-2:]
    )
