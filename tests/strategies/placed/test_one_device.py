import pytest
from devices import begin

from board import Board, series, text
from workers import Workers

pytestmark = pytest.mark.soak

SCRIPT = """
from kerasdist.callbacks import ScalingTensorBoard, job_view
from kerasdist.strategies.placed import placer

job_view.SECONDS = 0.3
folder = sys.argv[1]
ROWS = 16
x = np.random.default_rng(0).normal(size=(8 * ROWS, 16)).astype("float32")
y = x[:, :4] * 2

class Narrow(layers.Layer):
    '''Now and then there isn't memory enough for a whole batch.'''

    short = False

    def call(self, inputs):
        def check(value):
            if self.short and len(value) == ROWS:
                raise MemoryError("too much")
            return value
        made = tf.numpy_function(check, [inputs], inputs.dtype)
        return tf.ensure_shape(made, inputs.shape)

def outcome(calibrated):
    keras.utils.set_random_seed(1)
    strategy = kerasdist.ModelParallelStrategy(
        {"on0.*": "CPU:0", "on1.*": "CPU:1"}, micro_batches=2, rematerialize=True)
    with strategy.scope():
        table = kerasdist.layers.ShardedDense(32, shards=2, name="table")
        with strategy.stage("CPU:1"):
            last = layers.Dense(4)
        narrow = Narrow(name="on0_b")
        model = keras.Sequential([
            keras.Input((16,)), layers.Dense(32, name="on0_a"), table, narrow,
            layers.BatchNormalization(name="on1_a"), layers.Dropout(0.3, name="on1_b"),
            last])
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse",
            metrics=["mae"], steps_per_execution=2)
    def variables():
        return [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    def state():
        return [(v.value.device, v.numpy().tolist()) for v in variables()]
    before, callbacks = [], []
    if calibrated:
        board = ScalingTensorBoard(
            folder, update_freq="epoch", verbose=0, calibrate=True)
        note = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs:
            before or before.extend(v.value for v in variables()))
        callbacks = [note, board]
    history = model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
                        callbacks=callbacks).history
    # Of what trains, not of what was measured.
    report = str(strategy.placement_report())
    trained = state()
    if not calibrated:
        return [history, trained]
    placer.available_bytes = lambda: 1000
    baseline, job = job_view.Baseline(None, True), job_view.JobView(model)
    room = baseline.measure(job)
    placer.available_bytes = lambda: 1e9
    narrow.short = True
    return [history, trained], {
        "room": room,
        "short": baseline.measure(job),
        "devices": sorted({device[-5:] for device, _ in trained}),
        "report": "CPU:1" in report,
        "idle": [0 <= idle < 1 for idle in board.figures.idle],
        "after": state() == trained,
        "variables": [id(v.value) for v in variables()] == [id(v) for v in before]}

with_it, facts = outcome(True)
result({**facts, "same": outcome(False) == with_it})
"""


def test_one_device(tmp_path):
    found = Workers(begin(2) + SCRIPT, 1, [str(tmp_path)], deadline=120).run()[0].result
    # What copies need is known before.
    assert "fails: MemoryError: copies of other devices' " in found.pop("room")
    assert "here (a step on zeros fails: ResourceExhaustedErr" in found.pop("short")
    kept = dict.fromkeys(["report", "after", "variables", "same"], True)
    assert found == {"devices": ["CPU:0", "CPU:1"], "idle": [True, True], **kept}
    board = Board(tmp_path / "scaling")
    told = "\n".join(text(board, "events"))
    assert "One device with the whole model takes " in told
    assert "for a step on 16 samples, all zeros." in told
    assert all(percent > 0 for _, percent in series(board, "efficiency/percent"))
