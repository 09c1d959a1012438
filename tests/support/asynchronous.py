"""Scripts of jobs with ParameterServerStrategy(mode="async"), for tests.

results = run(body, size=3)      # what each worker has printed as its result
"""

from typing import Any

import keras
from scripts import with_prelude

from workers import Workers

o = keras.optimizers
# Each keeps something of its own, or changes what is sent.
OPTIMIZERS = {
    "sgd": lambda: o.SGD(0.1, momentum=0.9),
    "adam": lambda: o.Adam(0.01),
    "decay": lambda: o.AdamW(0.01, weight_decay=0.1),
    "clipping": lambda: o.SGD(0.1, global_clipnorm=0.1),
    "average": lambda: o.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: o.SGD(0.1, gradient_accumulation_steps=3),
    "loss_scale": lambda: o.LossScaleOptimizer(o.SGD(0.1)),
    "schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 2, 0.5)),
    # Keras asks for the number of the step here, and not of the update.
    "schedule_accumulation": lambda: o.SGD(
        o.schedules.ExponentialDecay(0.1, 2, 0.5), gradient_accumulation_steps=3
    ),
}

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

SETUP = with_prelude("""
devices = int(os.environ.get("DEVICES", "1"))
logical_devices(devices)
strategy = kerasdist.ParameterServerStrategy(
    "async", timeout=40, startup_timeout=60,
    devices=[f"CPU:{i}" for i in range(devices)],
    shard=os.environ.get("SHARD", "rows"),
    heartbeat_timeout=float(os.environ.get("HEARTBEAT", "30")),
    max_staleness=json.loads(os.environ.get("STALENESS", "null")),
    snapshot_dir=os.environ.get("SNAPSHOTS"), snapshot_updates=10)
""")

BEFORE = DIGESTS
BEFORE += """
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

SCRIPT = SETUP + BEFORE + "BODY\nstrategy.close()\n"


def job(body: str, size: int = 2, **more: Any) -> Workers:
    """A job of the script with this body, with one server unless `more` says else."""
    return Workers(
        SCRIPT.replace("BODY", body), size, **{"servers": 1, "deadline": 120, **more}
    )


def run(body: str, size: int = 2, **env: str) -> list[Any]:
    return job(body, size, env=env).results()
