"""micro_batches=M: numbers are those of whole batches, whatever a model is made of."""

import textwrap

import devices
import pytest
from devices import begin

from placement_zoo import ZOO
from places import SCRIPTS_PATH
from workers import Workers

SETUP = begin(3)
SETUP += """
rng = np.random.default_rng(0)
THREE = {"on0.*": "CPU:0", "on1.*": "CPU:1", "on2.*": "CPU:2"}

def strategy(parts, placement=THREE, **kwargs):
    return kerasdist.ModelParallelStrategy(placement, micro_batches=parts, **kwargs)

def scope(parts, placement=THREE, **kwargs):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    if parts is None:
        return contextlib.nullcontext()
    return strategy(parts, placement, **kwargs).scope()

def close(a, b, **how):
    tf.nest.map_structure(
        lambda x, y: np.testing.assert_allclose(x, y, **{
            "rtol": 1e-5, "atol": 1e-6, **how}), a, b)
"""


@pytest.fixture(scope="module")
def run():
    with devices.running(SETUP) as run:
        yield run


@pytest.mark.soak
def test_masks_ragged_rows_scalars_and_integers_come_out_as_of_a_whole_batch(run):
    run("""
        class Many(keras.Model):
            def __init__(self):
                super().__init__()
                self.words = layers.Embedding(9, 4, mask_zero=True, name="on0")
                self.dense = layers.Dense(3, name="on1")
            def call(self, x, training=False):
                words, ragged, sparse = x
                found = self.words(words)
                h = self.dense(found)
                h._keras_mask = found._keras_mask
                return {"masked": h, "ragged": ragged * 2.0, "sparse": sparse,
                        "largest": tf.argmax(h[:, 0], -1), "mean": tf.reduce_mean(h),
                        "nothing": None, "flag": training}

        words = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [4, 5, 0], [6, 0, 0]])
        ragged = tf.ragged.constant([[1.0], [], [2.0, 3.0], [4.0], [5.0]])
        sparse = tf.sparse.from_dense(np.diag(np.arange(1.0, 6.0)))
        found = []
        for parts in (1, 7):
            with scope(parts, {"on0": "CPU:0", "on1": "CPU:1"}):
                model = Many()
                model((words, ragged, sparse))
                placed = tf.distribute.get_strategy()

            @tf.function
            def step(*x):
                out = placed.run(lambda *x: {
                    **(out := model(x)), "mask": out["masked"]._keras_mask}, args=x)
                return {k: v for k, v in out.items() if tf.is_tensor(v)}
            dynamic = [tf.TensorSpec((None, 3), tf.int64),
                       tf.RaggedTensorSpec((None, None), tf.float32),
                       tf.SparseTensorSpec((None, 5), tf.float64)]
            traced = tf.function(step.python_function, dynamic)
            for call in (step, traced) if parts > 1 else (step,):
                out = call(tf.constant(words), ragged, sparse)
                out["ragged"] = out["ragged"].to_tensor(-1.0)
                out["sparse"] = tf.sparse.to_dense(out["sparse"])
                found.append({name: numpy(value) for name, value in out.items()})
        for other in found[1:]:
            close(other, found[0])
        assert found[0]["mask"].tolist() == (words != 0).tolist()
        result(0)
    """)


@pytest.mark.soak
def test_state_of_layers_and_dropout_of_micro_batches(run):
    """Each part has its own statistics; the moving ones forget as with one batch."""
    run("""
        import warnings
        x = rng.normal(2.0, 3.0, size=(12, 5)).astype("float32")
        def statistics(parts, rows, momentum=0.9):
            with scope(parts, {"on1": "CPU:1"}):
                model = keras.Sequential([
                    layers.BatchNormalization(momentum=momentum, name="on1")])
                model.compile("sgd", "mse")
            model.fit(x[:rows], x[:rows], batch_size=12, shuffle=False, verbose=0)
            assert model.layers[0].momentum == momentum
            return model.layers[0].moving_mean.numpy()

        close(statistics(4, 12, 0.99), 0.01 * x.mean(0), rtol=2e-2, atol=1e-4)
        # A part without rows changes nothing.
        expected = np.zeros(5)
        for row in x[:3]:
            expected = expected * 0.9 ** (1 / 3) + row * (1 - 0.9 ** (1 / 3))
        close(statistics(4, 3), expected)

        class Counter(layers.Layer):
            def build(self, shape):
                self.calls = self.add_weight(
                    initializer="zeros", trainable=False, name="calls")
            def call(self, x):
                self.calls.assign_add(1.0)
                return x

        with scope(3, {"on1": "CPU:1"}):
            dropout = layers.Dropout(0.5, seed=1, name="dropout")
            model = keras.Sequential([dropout, Counter(name="on1")])
            model.compile("sgd", "mse")
        ones = np.ones((6, 50), "float32")
        strategy = model.distribute_strategy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = numpy(tf.function(lambda: strategy.run(
                model, args=(tf.constant(ones),), kwargs={"training": True}))())
        drops = [found[i:i + 2].tobytes() for i in (0, 2, 4)]
        assert len(set(drops)) == 3 and set(np.unique(found)) == {0.0, 2.0}
        # State that a layer assigns for each part is warned of, others' isn't.
        said = [str(one.message) for one in caught if "micro" in str(one.message)]
        begin = "Layer 'on1' assigns its variable 'calls' when it's called. With micro"
        assert said and all(one.startswith(begin) for one in said), said
        result(0)
    """)


@pytest.mark.soak
def test_steps_of_ones_own_and_eager_ones(run):
    """A step that calls two models, and takes the gradient of a gradient."""
    run("""
        x = rng.normal(size=(11, 4)).astype("float32")
        class Adversaries(keras.Model):
            def __init__(self):
                super().__init__()
                self.maker = keras.Sequential(
                    [layers.Dense(4, "tanh", name="on0"), layers.Dense(4, name="on1")],
                    name="maker")
                self.judge = keras.Sequential(
                    [layers.Dense(4, "tanh", name="on1"), layers.Dense(1, name="on2")],
                    name="judge")
            def call(self, x):
                return self.judge(self.maker(x))
            def train_step(self, x):
                with tf.GradientTape() as tape:
                    made = self.maker(x)
                    with tf.GradientTape() as inner:
                        inner.watch(made)
                        verdict = self.judge(made)
                    slope = inner.gradient(verdict, made)
                    loss = (tf.reduce_mean(verdict ** 2)
                            + tf.reduce_mean(tf.norm(slope, axis=-1)))
                weights = self.trainable_weights
                self.optimizer.apply(tape.gradient(loss, weights), weights)
                return {"loss": loss}

        def numbers(parts, eagerly=False):
            with scope(parts):
                model = Adversaries()
                model.build((None, 4))
                model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
            model.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        whole = numbers(None)
        close(numbers(3), whole)
        close(numbers(3, eagerly=True), whole)
        result(0)
    """)


def test_each_device_takes_the_micro_batches_in_order(run):
    """In the graph that is executed, and with all edges that GPipe's schedule has."""
    found = run("""
        with scope(4):
            model = keras.Sequential(
                [keras.Input((6,)), layers.Dense(6, name="on0"),
                 layers.Dense(6, name="on1"), layers.Dense(6, name="on2")])
            model.compile("sgd", "mse")
        x = np.ones((8, 6), "float32")
        model.train_on_batch(x, x)
        import gc
        from tensorflow.python.framework.func_graph import FuncGraph
        # Those of earlier scripts aren't among the objects: they are frozen.
        names = [op.device[-5:] for graph in gc.get_objects()
                 if isinstance(graph, FuncGraph)
                 for op in graph.get_operations() if "micro_batch_done" in op.name]
        result([sorted(names), str(model.distribute_strategy.pipeline())])
    """)

    # 3 of 4 micro-batches wait for the one before, forward and backward.
    assert found[0] == sorted(["CPU:0", "CPU:1", "CPU:2"] * 6)
    assert found[1].startswith("3 stages, 4 micro-batches")


def test_what_is_refused(run):
    messages = run("""
        found = [refused(lambda parts=parts: strategy(parts)) for parts in (0, 2.0)]
        with scope(2):
            model = keras.Sequential(
                [keras.Input((5, 2), batch_size=4),
                 layers.LSTM(3, stateful=True, name="on0"),
                 layers.Dense(1, name="on1"), layers.Dense(1, name="on2")])
            model.compile("sgd", "mse")
        x, y = np.ones((4, 5, 2)), np.ones((4, 1))
        found.append(refused(lambda: model.fit(x, y, batch_size=4, verbose=0)))
        result(found)
    """)

    assert [m.partition(" Received")[0] for m in messages[:2]] == [
        "`micro_batches` must be a positive integer: into how many parts each batch is "
        "divided."
    ] * 2
    assert "micro_batches=2 with stateful=True in 'on0'" in messages[2]


# Numbers of parts and devices. With four parts activations are computed again.
CUTS = ((3, 3), (4, 2), (3, 2), (4, 3))
# In the suite one kind has one of them; the soak test has all others.
CUT = {"everything": CUTS[1]}
ZOO_SCRIPT = f"sys.path[:0] = {SCRIPTS_PATH!r}.split(os.pathsep)\n"
ZOO_SCRIPT += """
import placement_zoo as zoo

found = []
for name, cuts in CUTS.items():
    kind = zoo.ZOO[name]
    plain = zoo.plain_numbers(name, PLAIN)
    for parts, count in cuts:
        devices = [f"CPU:{i}" for i in range(count)]
        strategy = kerasdist.ModelParallelStrategy(
            zoo.placement(kind, devices), devices=devices, micro_batches=parts,
            rematerialize=parts == 4)
        numbers = zoo.numbers(kind, strategy.scope, None)
        model = numbers.pop("model")
        # What is computed in 16 bits is rounded after other sums.
        how = {"rtol": 1e-2, "atol": 2e-3} if name == "half" else {
            "rtol": 1e-5, "atol": 5e-6}
        differ = [
            f"{mine} {np.max(np.abs(numbers[mine] - plain[theirs]))}"
            for mine, theirs in zip(numbers, plain, strict=True)
            if not np.allclose(numbers[mine], plain[theirs], **how)]
        found.append(
            [name, parts, differ[:5], zoo.misplaced_variables(model, devices)[:5]])
result(found)
"""


def check_kinds(run, cuts, plain):
    found = run(f"CUTS, PLAIN = {cuts!r}, {str(plain)!r}\n{ZOO_SCRIPT}")
    assert sorted(found) == sorted(
        [name, parts, [], []] for name, each in cuts.items() for parts, _ in each
    )


@pytest.mark.timeout(300)
def test_kinds_of_models(run, plain_folder):
    """With batches of 4 rows, and of 2 at last."""
    check_kinds(run, {name: [cut] for name, cut in CUT.items()}, plain_folder)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kinds_of_models_in_other_cuts(run, plain_folder):
    by_rows = [name for name, kind in ZOO.items() if kind.by_rows]
    assert len(by_rows) >= 8
    others = {name: [c for c in CUTS if c != CUT.get(name)] for name in by_rows}
    check_kinds(run, others, plain_folder)


# With `rematerialize=True` the same numbers, from less memory.


@pytest.mark.soak
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
            e = layers.GlobalAveragePooling1D(name="on1_pool")(e)
            h = layers.Add(name="on1_both")([Block(name="on1_block")(h), h, e])
            return keras.Model([x, words], {
                "x": layers.Dense(2, kernel_regularizer="l2", name="on2_x")(h)})

        x, words = rng.normal(size=(12, 5)), rng.integers(0, 7, (12, 3))
        y = {"x": rng.normal(size=(12, 2))}
        def numbers(again):
            with scope(3, rematerialize=again):
                model = build()
                model.compile(keras.optimizers.SGD(0.1), "mse")
            history = model.fit([x.astype("float32"), words], y, batch_size=12,
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
        with scope(4, rematerialize=os.environ["AGAIN"] == "1"):
            model = keras.Sequential([keras.Input((64,))] + [
                layers.Dense(64, activation="gelu", name=f"on{i // 6}_{i}")
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

    kept, again = Workers(
        SETUP + textwrap.dedent(script), 2, env=environment, handover=False
    ).results()

    # 16 layers of 8 MB: what goes in, and what `gelu` needs.
    activations = 2 * 16 * 8e6
    assert kept > activations
    # Both processes trace, and have an allocator's reserve: only their difference is of
    # activations. Of four micro-batches each stage has one's at a time.
    assert kept - again > activations * 3 / 4
