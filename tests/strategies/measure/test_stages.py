"""How long stages are busy, against what is known: layers that sleep for a given time.

What `ScalingTensorBoard` writes of it is read by TensorBoard's own reader. Steps are
measured by the clock: a share of them that is known in seconds is known, too.
"""

from __future__ import annotations

import json

import pytest
from devices import begin
from sleeping import SLEEPING

from board import Board, near, series
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak]

# Seconds that a stage's layer sleeps for each micro-batch, forward and backward.
FORWARD, BACKWARD = (0.003, 0.012), (0.005, 0.020)
STEPS, ROWS = 8, 16
PARTS = 2

SETUP = (
    begin(2)
    + """
# Or who sleeps in a graph would hold up all others that want the one thread.
tf.config.threading.set_inter_op_parallelism_threads(8)
from kerasdist.callbacks import ScalingTensorBoard, Timeline

folder = os.environ["FOLDER"]
PLACES = {"on0.*": "CPU:0", "on1.*": "CPU:1"}
x = np.random.default_rng(0).normal(size=(STEPS * ROWS, 16)).astype("float32")
y = x[:, :4] * 2
"""
)
BUILD = """
def build(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stages = [
            [layers.Dense(32, "relu", name=f"on{i}_a"),
             Slow(FORWARD[i], BACKWARD[i], name=f"on{i}_b")]
            for i in range(2)]
        model = keras.Sequential(
            [keras.Input((16,)), *stages[0], *stages[1], layers.Dense(4, name="on1_c")])
        model.compile("adam", "mse")
    return model
"""
CONSTANTS = (
    f"FORWARD, BACKWARD = {FORWARD}, {BACKWARD}\n"
    f"STEPS, ROWS, PARTS = {STEPS}, {ROWS}, {PARTS}\n"
)

HYBRID = """
strategy = kerasdist.RingStrategy(
    placement=PLACES, micro_batches=PARTS, transport="tcp", timeout=60)
model = build(strategy)
from kerasdist.callbacks import job_view
from kerasdist.strategies.measure import step_clock
job_view.SECONDS = 0.3
step_clock._ROWS = ()  # all steps are measured, as there are few
board = ScalingTensorBoard(
    folder + "/hybrid", update_freq="epoch", verbose=0, calibrate=True)
model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
          callbacks=[
    Timeline(folder + "/hybrid.json", steps=(2, 6), verbose=0), board])
found = {"weights": [w.tolist() for w in model.get_weights()], "gradients": sum(
    4 * w.numpy().size for w in model.trainable_weights)}
figures = board.figures
if figures is not None:
    found |= {"idle": figures.idle, "step": figures.step_seconds,
        "bytes": figures.bytes_per_step, "phases": figures.phases,
        "speed": figures.examples_per_second, "baseline": figures.baseline,
        "efficiency": figures.efficiency}
print("RESULT", json.dumps(found))
"""


def check_timeline(path):
    """Each stage takes its micro-batches in order, inside of each step."""
    order = [f"forward {i}" for i in range(PARTS)]
    order += [f"backward {i}" for i in reversed(range(PARTS))]
    found = json.loads(path.read_text())["traceEvents"]
    pids = {e["pid"] for e in found}
    assert len(pids) == 2
    for pid in pids:
        mine = [e for e in found if e["pid"] == pid and e["ph"] == "X"]
        steps = [e for e in mine if e["name"].startswith("step ")]
        assert [step["name"] for step in steps] == [f"step {i}" for i in range(2, 6)]
        threads = sorted({e["tid"] for e in mine if e["cat"] == "stage"})
        assert len(threads) == 2
        for stage, thread in enumerate(threads):
            lane = [e for e in mine if e["tid"] == thread]
            for step in steps:
                inside = [
                    e
                    for e in lane
                    if e["ts"] >= step["ts"]
                    and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
                    and e["name"] != "compute"
                ]
                assert [e["name"] for e in inside] == order, step
                for each in inside:
                    slept = FORWARD if "forward" in each["name"] else BACKWARD
                    assert each["dur"] > 1e6 * slept[stage]
            ends = 0.0
            for each in lane:
                assert each["ts"] >= ends - 0.01
                ends = each["ts"] + each["dur"]


def test_stages_of_several_workers(tmp_path):
    """`RingStrategy(placement=...)`, with a calibration."""
    script = CONSTANTS + SETUP + SLEEPING + BUILD + HYBRID
    with Workers(script, 2, env={"FOLDER": str(tmp_path)}, deadline=120) as job:
        chief, other = [one.result for one in job.succeed()]
    assert chief["weights"] == other["weights"]
    check_timeline(tmp_path / "hybrid.json")
    assert "idle" not in other
    assert near(chief["speed"], ROWS / chief["step"], 0.1)
    assert near(sum(chief["phases"].values()), chief["step"], 1e-6)
    # One worker, with its devices and micro-batches, takes the whole batch in as long
    # as each of two takes its half: layers sleep whatever they are given.
    alone = ROWS / chief["baseline"] - chief["phases"]["outside"]
    assert PARTS * sum(FORWARD[1:] + BACKWARD[1:]) < alone < 1.2 * chief["step"], chief
    assert near(chief["efficiency"], chief["speed"] / chief["baseline"] / 2, 1e-6)
    # Of two workers each sends half of the gradients twice.
    assert chief["gradients"] < chief["bytes"] < 1.1 * chief["gradients"]
    board = Board(tmp_path / "hybrid" / "scaling")
    assert series(board, "job/workers") == [(STEPS, 2), (2 * STEPS, 2)]
    for stage in (0, 1):
        slept = PARTS * (FORWARD[stage] + BACKWARD[stage])
        expected = 1 - slept / chief["step"]
        assert expected - 0.2 < chief["idle"][stage] <= expected + 0.01, chief
        assert len(series(board, f"idle_percent/stage_{stage}")) == 2
