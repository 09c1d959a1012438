"""Scripts of jobs with ParameterServerStrategy(mode="async"), for tests.

results = run(body, size=3)      # what each worker has printed as its result
"""

from __future__ import annotations

from typing import Any

from scripts import PRELUDE

from workers import Workers

__all__ = ["BEFORE", "DIGESTS", "SCRIPT", "SETUP", "run"]

DIGESTS = """
def digest(m):
    return hashlib.sha256(b"".join(w.tobytes() for w in m.get_weights())).hexdigest()

class Digests(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []
    def on_epoch_end(self, epoch, logs=None):
        self.found.append([digest(self.model), logs])

"""

SETUP = (
    PRELUDE
    + """
strategy = kerasdist.ParameterServerStrategy(
    "async", timeout=40, startup_timeout=60,
    heartbeat_timeout=float(os.environ.get("HEARTBEAT", "30")),
    max_staleness=json.loads(os.environ.get("STALENESS", "null")),
    snapshot_dir=os.environ.get("SNAPSHOTS"), snapshot_updates=10)
"""
)

BEFORE = (
    DIGESTS
    + """
rank = strategy.rank
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(600, 8)).astype("float32")
y = (x @ rng.normal(size=(8, 4))).argmax(1)

def build(optimizer=lambda: "adam", **more):
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4)])
        m.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"], **more)
    return m

# Of other processes' files and events nothing tells.
def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(condition)
        time.sleep(0.002)

def wait_for(path):
    wait_until(lambda: os.path.exists(path))

"""
)

SCRIPT = SETUP + BEFORE + "BODY\nstrategy.close()\n"


def run(body: str, size: int = 2, **env: str) -> list[Any]:
    """Runs the script with this body; returns each worker's result."""
    script = SCRIPT.replace("BODY", body)
    with Workers(script, size, servers=1, env=env, deadline=120) as job:
        return [worker.result for worker in job.succeed()[:size]]
