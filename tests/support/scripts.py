"""What scripts of workers that train begin with: imports, and small functions."""

PRELUDE = """
import contextlib, hashlib, json, logging, os, signal, sys, time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import kerasdist

def logical_devices(count):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * count)

def untuned(dataset):
    # TensorFlow 2.21's autotuner sometimes keeps the destructor of an iterator of
    # several devices waiting for up to a minute, its longest period.
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)

def result(value):
    # In one piece: another thread may say meanwhile that somebody was lost.
    sys.stdout.write("\\nRESULT " + json.dumps(value) + "\\n")
    sys.stdout.flush()

def error_of(call):
    "The kind and the text of what it raises, or None."
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]

def refused(call):
    "The text of what it raises."
    return (error_of(call) or [None, None])[1]

class Batches(keras.utils.PyDataset):
    "Each `size` rows of arrays."
    def __init__(self, size, *arrays, **more):
        super().__init__(**more)
        self.size, self.arrays = size, arrays
    def __len__(self):
        return -(-len(self.arrays[0]) // self.size)
    def __getitem__(self, number):
        first = number * self.size
        return tuple(array[first : first + self.size] for array in self.arrays)

def lines_said():
    "A list of what the library says from now on."
    said, handler, logger = [], logging.Handler(), logging.getLogger("kerasdist")
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return said
"""


# Runs a file of tests with pytest, and prints {"<class>::<test>": "<outcome>"}.
RUN_TESTS = """
import pytest

class Outcomes(dict):
    def pytest_runtest_logreport(self, report):
        # "call", and what failed or was skipped before or after it.
        if report.when == "call" or report.outcome != "passed":
            self[report.nodeid.split("::", 1)[-1]] = report.outcome

outcomes = Outcomes()
pytest.main(
    [sys.argv[1], "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/"],
    [outcomes],
)
result(outcomes)
"""


def with_prelude(script: str) -> str:
    return PRELUDE + script


# A job whose workers end each other; needs the variable FOLDER.
ELASTIC = """
os.chdir(os.environ["FOLDER"])
strategy = kerasdist.RingStrategy(elastic=True, heartbeat_timeout=5)
me = strategy.rank
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss, metrics=["accuracy"])
"""

# Needs `strategy`.
NOTING = """
trained = []

class Noting(keras.Model):
    "Notes the first feature of every row that this worker trains on."
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    def build(self, shape):
        self.dense.build(shape)
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        def note(values):
            trained.append([int(v) for v in values])
            return np.int64(0)
        tf.numpy_function(note, [x[:, 0]], tf.int64)
        return super().train_step(data)

def noting(rate):
    with strategy.scope():
        model = Noting()
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(rate), "mse")
    return model

"""

_LONG_FIT = """
strategy = STRATEGY(
    heartbeat_timeout=HEARTBEAT, timeout=40, startup_timeout=60)
with strategy.scope():
    m = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    m.compile("sgd", "mse")
x = np.ones((64, 8), "float32")

class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            print("training", flush=True)
        FAULT

try:
    m.fit(x, x[:, :4], batch_size=16, epochs=EPOCHS, verbose=0, callbacks=[Say()])
except kerasdist.errors.CollectiveError as error:
    facts = {name: getattr(error, name, None)
             for name in ("rank", "index", "host", "step")}
    result({
        "class": type(error).__name__, "message": str(error), "at": time.time(), **facts
    })
    sys.exit(7)
"""


def long_fit(
    strategy: str, fault: str = "pass", epochs: int = 100_000, heartbeat: float = 30.0
) -> str:
    """A `fit` that says when it trains, has a fault, and tells what error ends it."""
    script = PRELUDE + _LONG_FIT.replace("STRATEGY", f"kerasdist.{strategy}")
    script = script.replace("FAULT", fault).replace("EPOCHS", str(epochs))
    return script.replace("HEARTBEAT", str(heartbeat))
