"""Scripts that place layers: on several devices, which are made of one CPU."""

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from scripts import PRELUDE

from sessions import Session
from workers import Workers

_BEGIN = """
import re, tempfile
from keras import layers

logical_devices(DEVICES)
# Grappler moves and prices operations, see `warm.py`.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
numpy = keras.ops.convert_to_numpy

def refused(call, error=ValueError):
    try:
        call()
    except error as e:
        return str(e)
    raise SystemExit("it wasn't refused")

def message(call, *args, **kwargs):
    found = error_of(lambda: call(*args, **kwargs))
    return found and ": ".join(found)
"""

# What jobs of several workers train, whatever their models' layers are.
CLASSIFIER = """
random = np.random.default_rng(0)
x = random.random((50, 8), dtype="float32")
y = random.integers(0, 3, 50)

def compiled(model):
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model

def numbers(model):
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    found = [*history.history.values(), model.evaluate(x, y, verbose=0)]
    found += [model.predict(x, verbose=0), *model.get_weights()]
    return [np.asarray(number).tolist() for number in found]

PREDICTED = 3  # among the numbers
"""


def begin(devices: int) -> str:
    """What a script begins with: imports, so many devices, and how it tells results."""
    return PRELUDE + _BEGIN.replace("DEVICES", str(devices))


@contextlib.contextmanager
def running(setup: str) -> Iterator[Callable[[str], Any]]:
    """A function that returns the result of a script in one process, see `Session`."""
    with Session(setup, 1, deadline=150) as session:
        yield lambda body: session.run(textwrap.dedent(body))[0]


def run(setup: str, body: str) -> Any:
    return Workers(setup + textwrap.dedent(body), 1, deadline=150).run()[0].result


# Two layers for three devices, and where a variable is.
TWO_LAYERS = begin(3)
TWO_LAYERS += """
def device(variable):
    return variable.value.device.rpartition("/device:")[2]

x = np.ones((4, 8), "float32")
y = np.ones((4, 2), "float32")

def two_layers():
    return keras.Sequential(
        [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")]
    )
"""
