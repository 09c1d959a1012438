import signal

import pytest
from scripts import with_prelude

from workers import Workers

# The third worker gets no row, so that its memory is zero: what is lost with it changes
# no number. It dies between two steps, or in the midst of one.
SCRIPT = with_prelude("""
from kerasdist.collectives.checked import CheckedCommunicator

random = np.random.default_rng(0)
x = random.normal(size=(12, 8)).astype("float32")
y = (x @ random.normal(size=(8, 3))).astype("float32")
lines = lines_said()
given = os.environ["COMPRESSION"]
compression = kerasdist.TopK(0.1, momentum=0.5) if given == "topk" else given
strategy = kerasdist.RingStrategy(
    elastic=True, compression=compression, timeout=60, heartbeat_timeout=10
)
rank = strategy.rank
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.02)
    model.compile(optimizer, "mse", run_eagerly=os.environ["EAGER"] == "1")

step, calls = 0, 0
def die():
    if rank == 2:
        time.sleep(0.5)  # the others assign meanwhile what they keep
        os.kill(os.getpid(), signal.SIGKILL)

class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        global step, calls
        step, calls = step + 1, 0
        if step == 4 and os.environ["MOMENT"] == "between":
            die()

def counted(original):
    def call(self, *args, **more):
        global calls
        calls += 1
        # After the two of the compressor.
        if step == 4 and os.environ["MOMENT"] == "inside" and calls == 3:
            die()
        return original(self, *args, **more)
    return call
CheckedCommunicator.all_reduce = counted(CheckedCommunicator.all_reduce)
CheckedCommunicator.all_gather = counted(CheckedCommunicator.all_gather)

model.fit(x, y, batch_size=2, epochs=2, verbose=0, shuffle=False, callbacks=[Steps()])
kept = strategy.extended.workers.memories.variables
result({
    "weights": [w.tolist() for w in model.get_weights()],
    "kept": sum(float(np.abs(v.numpy()).sum()) for v in kept),
    "lines": [line for line in lines if "hadn't sent" in line],
})
""")


@pytest.mark.timeout(200)
@pytest.mark.soak
@pytest.mark.parametrize(("compression", "eager"), [("powersgd", "0"), ("topk", "1")])
def test_a_repeated_step_begins_with_what_was_kept(compression, eager):
    found = []
    for moment in ("between", "inside"):
        env = {"COMPRESSION": compression, "MOMENT": moment, "EAGER": eager}
        with Workers(SCRIPT, 3, env=env, deadline=60) as job:
            workers = [job.wait_one(rank) for rank in range(3)]
        assert workers[2].returncode == -signal.SIGKILL
        first, second = (worker.result for worker in workers[:2])
        assert first["weights"] == second["weights"]
        assert first["kept"] > 0
        assert len(first["lines"]) == 1
        found.append((first["weights"], first["kept"], second["kept"]))
    assert found[0] == found[1]
