from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude

import kerasdist
from kerasdist.callbacks import BroadcastInitialState
from kerasdist.strategies.reduce.initial_state import share_state
from workers import Workers

COMMON = with_prelude("""
from kerasdist.callbacks import (
    BroadcastInitialState, ScaleLearningRate, ScalingTensorBoard, Timeline)

x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
y = x.sum(1, keepdims=True)

class Counters(keras.layers.Layer):
    "State of dtypes that no collective adds up, and of no elements."
    def build(self, shape):
        for dtype in ("bool", "int8", "bfloat16", "float32"):
            self.add_weight(shape=(0 if dtype == "float32" else 2,), dtype=dtype,
                            initializer="zeros", trainable=False, name=dtype)
    def call(self, x):
        return x

def build():
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((4,)), Counters(), keras.layers.Dense(3),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(), keras.layers.Dense(1),
        ])
        m.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        m.optimizer.build(m.trainable_variables)
    return m

def everything(m):
    found = {id(v): v for v in [*m.variables, *m.optimizer.variables]}
    return list(found.values())

def disturb(m, amount):
    # Weights, slots, counters, statistics, seeds: each rank has its own.
    with strategy.scope():
        for variable in everything(m):
            held = held_by(variable)
            variable.assign((held + np.asarray(amount)).astype(held.dtype))

def held_by(v):
    return np.asarray(v.value.values[0] if hasattr(v.value, "values") else v.value)

class State(keras.callbacks.Callback):
    "What is there before the first step, which comes first in the list or last."
    def on_train_begin(self, logs=None):
        self.found = None
    def on_train_batch_begin(self, batch, logs=None):
        if self.found is None:
            self.found = {v.path: held_by(v).tolist() for v in everything(self.model)}

def fit(m, callbacks, **more):
    state = State()
    m.fit(x, y, **{"batch_size": 8, "epochs": 1, "verbose": 0, **more},
          callbacks=[*callbacks, state])
    return state.found
""")

RING = """
strategy = kerasdist.RingStrategy(timeout=60)
rank = strategy.rank
found = {}

m = build()
disturb(m, rank + 1)
share = BroadcastInitialState(root=1)
found["root"] = {v.path: held_by(v).tolist() for v in everything(m)}
found["begin"] = fit(m, [share])
found["bytes"] = [share.bytes, share.seconds > 0]
found["weights"] = [w.tolist() for w in m.get_weights()]
# The second time all hold the same: nothing travels.
fit(m, [share])
found["again"] = [share.bytes, share.seconds > 0]

# What only rank 0's callback can load comes after this one's turn in the list.
class Load(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if rank == 0:
            self.model.layers[1].bias.assign([7.0, 8.0, 9.0])
m = build()
began = fit(m, [BroadcastInitialState(verbose=0), Load()])
found["loaded"] = [v for path, v in began.items() if path.endswith("dense_2/bias")]

def refusal(callbacks):
    return refused(lambda: fit(m, callbacks))

m = build()
disturb(m, rank)
found["without"] = refusal([])
found["no rank"] = refusal([BroadcastInitialState(root=2)])
class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass

found["on one"] = [
    refusal([BroadcastInitialState()] if rank == 0 else []),
    refusal([ScalingTensorBoard("unused", verbose=0)] if rank == 0 else []),
    refusal([Timeline("unused"), ScaleLearningRate()][:: 1 if rank else -1]),
    refusal([Stops()] if rank else [])]
found["left"] = os.path.exists("unused")
# What one does by itself is its own affair.
alone = keras.callbacks.LambdaCallback()
fit(m, [BroadcastInitialState(verbose=0), *([alone] if rank else [])])
result(found)
"""


def test_ring():
    finished = Workers(COMMON + RING, 2, deadline=120).run()
    zero, one = (each.result for each in finished)
    root = one["root"]
    assert zero["root"] != root
    for found in (zero, one):
        begin = found["begin"]
        assert set(begin) == set(root)
        assert any("seed" in path for path in root)
        assert any("momentum" in path for path in root)
        for path, value in root.items():
            # Keras sets the metrics back when an epoch begins.
            if path.split("/")[0] not in ("loss", "mae", "mean_metric_wrapper"):
                assert begin[path] == value, path
        assert found["weights"] == zero["weights"]
        assert found["bytes"] == [zero["bytes"][0], True]
        assert found["loaded"] == [[7.0, 8.0, 9.0]]
        assert "BroadcastInitialState()" in found["without"]
        assert found["no rank"].startswith("There is no such rank to take the initial")
        for refusal, given in zip(
            found["on one"],
            (
                "on rank 0 [BroadcastInitialState]; on rank 1 [].",
                "on rank 0 [ScalingTensorBoard]; on rank 1 [].",
                "on rank 0 [ScaleLearningRate, Timeline]; on rank 1 [Timeline, Scale",
                "on rank 0 []; on rank 1 [one with `on_train_batch_end`].",
            ),
            strict=True,
        ):
            assert refusal.startswith("Callbacks in which the workers communicate ")
            assert f"Received: callbacks={given}" in refusal
        assert not found["left"]
        assert found["again"] == [0, True]
    # float32, three int64 (steps, seeds), 2 x (int8, bfloat16); the bools are equal,
    # and Keras sets metrics back.
    metrics = ("loss", "mae", "mean_metric_wrapper")
    sent = {p: v for p, v in root.items() if p.split("/")[0] not in metrics}
    sizes = sum(np.size(v) for p, v in sent.items() if "counters" not in p)
    assert zero["bytes"][0] == 4 * sizes + 4 * 3 + 2 * (1 + 2)
    lines = [x for x in finished[0].output.splitlines() if "hold the state" in x]
    assert len(lines) >= 2
    assert lines[0].startswith("kerasdist: all 2 workers hold the state of rank 1: ")
    assert "variables differed" in lines[0]
    assert "variables were equal, nothing sent, " in lines[1]
    assert "hold the state" not in finished[1].output


ASYNC = """
strategy = kerasdist.ParameterServerStrategy("async", timeout=60)
rank = strategy.rank
m = build()
disturb(m, rank + 1)
kernel = m.layers[1].kernel
own = np.asarray(kernel).tolist()
class First(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.kernel = np.asarray(kernel).tolist()
first = First()
fit(m, [BroadcastInitialState(root=1), first])
begin = first.kernel
with strategy.scope():
    kernel.assign(kernel + rank + 1.0)
set_to = np.asarray(kernel).tolist()
fit(m, [BroadcastInitialState(root=1), first], epochs=1)
weights = [w.tolist() for w in m.get_weights()]
differ = refused(lambda: fit(m, [ScalingTensorBoard("unused")] if rank else []))
result([own, begin, set_to, first.kernel, weights, differ])
"""


@pytest.mark.soak
def test_the_table_of_servers_takes_it_too():
    zero, one = Workers(COMMON + ASYNC, 2, servers=1, deadline=90).results()
    assert zero[0] != one[0]
    assert zero[1] == one[1] == one[0]
    assert zero[2] != one[2]
    assert zero[3] == one[3] == one[2]
    assert zero[4] == one[4]
    for refused in (zero[5], one[5]):
        assert "callbacks=on rank 0 []; on rank 1 [ScalingTensorBoard]." in refused


def test_copies_that_differ_alike_on_all_ranks():
    others = SimpleNamespace(
        size=2, ranks=[0, 1], broadcast=lambda values, root: values
    )
    # Of the form, of hashes, which are drawn where copies differ, and of those after.
    flips = iter([0, 1, 0])
    others.all_gather = lambda mine: [mine, mine ^ np.uint8(next(flips))]
    workers = SimpleNamespace(communicator=others, copies=lambda held: held)
    copies = [tf.Variable([1.0]), tf.Variable([2.0])]
    assert share_state(workers, [copies], 0).differed == 1
    assert [copy.numpy().tolist() for copy in copies] == [[1.0], [1.0]]


def test_one_worker_and_none(said):
    names = {"strategy": kerasdist.RingStrategy()}
    exec(COMMON, names)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    for model in (names["build"](), plain):
        share = BroadcastInitialState()
        model.fit(x, x[:, :1], verbose=0, callbacks=[share])
        assert share.bytes == 0
        wrong = BroadcastInitialState(root=1)
        with pytest.raises(ValueError, match=r"^There is no such rank to take the"):
            model.fit(x, x[:, :1], verbose=0, callbacks=[wrong])
    names["strategy"].close()
    assert not [line for line in said() if line.startswith("kerasdist: all")]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"^`root` must be a rank, a whole number\. "):
        BroadcastInitialState(root="chief")
    with pytest.raises(ValueError, match=r"^`root` must be a rank, 0 or more\. "):
        BroadcastInitialState(root=-1)
