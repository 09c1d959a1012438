"""rematerialize=True: the same numbers, from less memory."""

from __future__ import annotations

import textwrap

import devices
import pytest
from devices import begin

from workers import Workers

SETUP = (
    begin(2)
    + """
rng = np.random.default_rng(0)

def scope(again, parts):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return kerasdist.ModelParallelStrategy(
        {"on0.*": "CPU:0", "on1.*": "CPU:1"},
        micro_batches=parts, rematerialize=again).scope()
"""
)


@pytest.fixture(scope="module")
def run():
    with devices.running(SETUP) as run:
        yield run


def test_what_is_computed_again_is_what_was_computed(run):
    """Dropout, statistics, losses and metrics of layers, masks."""
    run("""
        class Block(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.dense = layers.Dense(8, name="dense")
                self.drop = layers.Dropout(0.3, seed=4)
                self.mean = keras.metrics.Mean(name=f"mean_{self.name}")
            def build(self, shape):
                self.dense.build(shape)
                self.built = True
            def call(self, x):
                y = self.drop(tf.nn.gelu(self.dense(x)))
                self.add_loss(tf.reduce_mean(y ** 2))
                self.mean.update_state(y)
                return y

        def build():
            x, words = keras.Input((5,)), keras.Input((3,), dtype="int32")
            h = layers.Dense(8, activation="gelu", name="on0_dense")(x)
            h = layers.BatchNormalization(momentum=0.7, name="on0_norm")(h)
            h = layers.Dropout(0.2, seed=1, name="on0_drop")(h)
            e = layers.Embedding(7, 8, mask_zero=True, name="on0_words")(words)
            e = layers.SimpleRNN(8, name="on1_rnn")(e)
            h = layers.Concatenate(name="both")([Block(name="on1_block")(h) + h, e])
            return keras.Model([x, words], {
                "x": layers.Dense(2, kernel_regularizer="l2", name="on1_x")(h)})

        x, words = rng.normal(size=(12, 5)), rng.integers(0, 7, (12, 3))
        y = {"x": rng.normal(size=(12, 2))}
        def numbers(again):
            with scope(again, 3):
                model = build()
                model.compile(keras.optimizers.SGD(0.1), "mse")
            history = model.fit([x.astype("float32"), words], y, batch_size=6,
                                epochs=2, shuffle=False, verbose=0).history
            return {**history, **{
                f"{i} {w.path}": w.numpy() for i, w in enumerate(model.weights)}}

        kept, again = numbers(False), numbers(True)
        for (name, a), b in zip(kept.items(), again.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
        result(0)
    """)


@pytest.mark.soak
def test_it_takes_less_memory():
    """By the peaks of two processes, each from before its first step."""
    script = """
        import os
        def status(name):
            with open("/proc/self/status") as lines:
                for line in lines:
                    if line.startswith(name):
                        return int(line.split()[1]) * 1024
        with scope(os.environ["AGAIN"] == "1", 4):
            model = keras.Sequential([keras.Input((64,))] + [
                layers.Dense(64, activation="gelu", name=f"on{i // 8}_{i}")
                for i in range(16)])
            model.compile("sgd", "mse")
        x = np.ones((32768, 64), "float32")
        data = iter(tf.data.Dataset.from_tensors((x, x)).repeat())
        model.make_train_function()
        before = status("VmRSS")
        model.train_function(data)
        result(status("VmHWM") - before)
    """

    def environment(rank):
        return {"AGAIN": str(rank), "TF_CONFIG": None}

    with Workers(
        SETUP + textwrap.dedent(script), 2, env=environment, handover=False
    ) as job:
        kept, again = (worker.result for worker in job.succeed())

    # 16 layers of 8 MB: what goes in, and what `gelu` needs.
    activations = 2 * 16 * 8e6
    assert kept > activations
    # Both processes trace, and have an allocator's reserve: only their difference is of
    # activations. Of four micro-batches each stage has one's at a time.
    assert kept - again > activations * 3 / 4
