"""micro_batches=M: numbers are those of whole batches, whatever a model is made of."""

from __future__ import annotations

import json

import devices
import pytest
from devices import begin

from placement_zoo import ZOO
from places import SCRIPTS_PATH
from workers import Workers

BY_ROWS = [name for name, kind in ZOO.items() if kind.by_rows]

SETUP = (
    begin(3)
    + """
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
)


@pytest.fixture(scope="module")
def run():
    with devices.running(SETUP) as run:
        yield run


def test_a_model_with_all_that_depends_on_rows(run):
    """Inputs and outputs in dicts, losses of layers, weights, metrics; 5 rows at last.

    The last batch has fewer rows than there are micro-batches.
    """
    run("""
        class Own(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.mean = keras.metrics.Mean(name="of_scalars")
                self.rows = keras.metrics.Mean(name="of_rows")
            def call(self, x):
                self.add_loss(0.1 * tf.reduce_mean(x ** 2))
                self.add_loss(0.01 * tf.reduce_sum(x ** 2, axis=-1))
                self.mean.update_state(tf.reduce_mean(x))
                self.rows.update_state(tf.reduce_mean(x, -1))
                return x

        def build():
            a, b = keras.Input((8,)), keras.Input((5,), dtype="int32")
            h = layers.Dense(16, "relu", activity_regularizer="l2", name="on0_a")(a)
            g = layers.Embedding(9, 4, mask_zero=True, name="on0_b")(b)
            g = layers.GlobalAveragePooling1D(name="on1_pool")(g)
            g = layers.Dense(16, name="on1_b")(g)
            h = Own(name="on1_own")(h)
            h = layers.Dense(16, "tanh", kernel_regularizer="l2", name="on1_c")(h + g)
            out = {"p": layers.Dense(3, "softmax", name="on2_p")(h),
                   "q": layers.Dense(1, name="on2_q")(h)}
            model = keras.Model({"a": a, "b": b}, out)
            model.compile(
                keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0),
                {"p": "sparse_categorical_crossentropy", "q": "mse"},
                metrics={"p": ["accuracy"], "q": ["mae"]})
            return model

        n = 37
        x = {"a": rng.normal(size=(n, 8)).astype("float32"),
             "b": rng.integers(0, 9, (n, 5))}
        y = {"p": rng.integers(0, 3, n), "q": rng.normal(size=(n, 1))}
        weights = {name: rng.uniform(size=n).astype("float32") for name in y}

        def numbers(parts):
            with scope(parts):
                model = build()
            fitted = model.fit(x, y, sample_weight=weights, batch_size=16, epochs=1,
                               shuffle=False, verbose=0)
            return fitted.history, model.get_weights()

        whole = numbers(None)
        close(numbers(6), whole)
        result(0)
    """)


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

            @tf.function(reduce_retracing=True)
            def step(*x):
                out = placed.run(lambda *x: {
                    **(out := model(x)), "mask": out["masked"]._keras_mask}, args=x)
                return {k: v for k, v in out.items() if tf.is_tensor(v)}
            dynamic = [tf.TensorSpec((None, 3), tf.int64),
                       tf.RaggedTensorSpec((None, None), tf.float32),
                       tf.SparseTensorSpec((None, 5), tf.float64)]
            for call in (step, tf.function(step.python_function, dynamic)):
                out = call(tf.constant(words), ragged, sparse)
                out["ragged"] = out["ragged"].to_tensor(-1.0)
                out["sparse"] = tf.sparse.to_dense(out["sparse"])
                found.append({name: numpy(value) for name, value in out.items()})
        for other in found[1:]:
            close(other, found[0])
        assert found[0]["mask"].tolist() == (words != 0).tolist()
        result(0)
    """)


def test_batch_normalization_and_dropout_of_micro_batches(run):
    """Each part has its own statistics; the moving ones forget as with one batch."""
    run("""
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

        with scope(3, {"on1": "CPU:1"}):
            model = keras.Sequential([layers.Dropout(0.5, seed=1, name="on1")])
            model.compile("sgd", "mse")
        ones = np.ones((6, 50), "float32")
        strategy = model.distribute_strategy
        found = numpy(tf.function(lambda: strategy.run(
            model, args=(tf.constant(ones),), kwargs={"training": True}))())
        drops = [found[i:i + 2].tobytes() for i in (0, 2, 4)]
        assert len(set(drops)) == 3 and set(np.unique(found)) == {0.0, 2.0}
        result(0)
    """)


def test_state_that_a_layer_assigns_for_each_micro_batch_is_warned_of(run):
    run("""
        import warnings
        class Counter(layers.Layer):
            def build(self, shape):
                self.calls = self.add_weight(
                    initializer="zeros", trainable=False, name="calls")
            def call(self, x):
                self.calls.assign_add(1.0)
                return x

        def counted(parts):
            with scope(parts, {"on1": "CPU:1"}):
                model = keras.Sequential([
                    layers.BatchNormalization(), Counter(name="on1")])
                model.compile("sgd", "mse")
            x = np.ones((12, 2), "float32")
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model.fit(x, x, batch_size=12, verbose=0)
            said = [str(one.message) for one in found if "micro" in str(one.message)]
            return float(model.layers[1].calls.value), said

        assert counted(1) == (1.0, [])
        calls, said = counted(3)
        assert calls == 3
        begin = "Layer 'on1' assigns its variable 'calls' when it's called. With micro"
        assert said and all(one.startswith(begin) for one in said), said
        result(0)
    """)


def test_tables_that_are_looked_up_by_constants(run):
    """Adam squares each slice: a lookup has one for all micro-batches."""
    run("""
        class Positions(layers.Layer):
            def __init__(self, **options):
                super().__init__(**options)
                self.table = layers.Embedding(6, 4)
            def call(self, x):
                known, length = keras.ops.arange(5), keras.ops.shape(x)[1]
                few = self.table(keras.ops.convert_to_tensor([2, 2, 3]))
                return (x + self.table(known) + keras.ops.mean(few, 0)
                        + self.table(keras.ops.arange(length) + 1))

        x = rng.normal(size=(11, 5, 4)).astype("float32")
        def trained(parts, rows=None, size=5):
            with scope(parts, {"on1": "CPU:1"}):
                inputs = keras.Input((size, 4))
                outputs = layers.Dense(2, name="on1")(Positions()(inputs))
                model = keras.Model(inputs, outputs)
                model.compile(keras.optimizers.Adam(0.1, clipnorm=0.1), "mse")
            data = tf.data.Dataset.from_tensor_slices((x, x[..., :2])).batch(4)
            if rows is None:
                data = data.map(lambda x, y: (
                    tf.ensure_shape(x, (None, size, 4)),
                    tf.ensure_shape(y, (None, size, 2))))
            model.fit(data, epochs=2, verbose=0)
            return model.get_weights()

        whole = trained(None)
        for size in (5, None):
            close(trained(3, size=size), whole)
        # Twice in a step, once by a batch of one row.
        def twice(parts):
            with scope(parts, {"on1": "CPU:1"}):
                inputs = keras.Input((5, 4))
                model = keras.Model(
                    inputs, layers.Dense(2, name="on1")(Positions()(inputs)))
                optimizer = keras.optimizers.Adam(0.1)
                optimizer.build(model.trainable_variables)
            def step(x):
                with tf.GradientTape() as tape:
                    loss = (tf.reduce_mean(model(x) ** 2)
                            + tf.reduce_mean(model(x[:1]) ** 3))
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            if parts is None:
                tf.function(step)(tf.constant(x))
            else:
                with model.distribute_strategy.scope():
                    tf.function(lambda: model.distribute_strategy.run(
                        step, args=(tf.constant(x),)))()
            return model.get_weights()

        close(twice(3), twice(None))
        result(0)
    """)


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
            with contextlib.nullcontext() if not eagerly else warned():
                model.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        @contextlib.contextmanager
        def warned():
            import warnings
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield

        whole = numbers(None)
        close(numbers(3), whole)
        close(numbers(3, eagerly=True), whole)
        result(0)
    """)


def test_each_device_takes_the_micro_batches_in_order():
    """In the graph that is executed, and with all edges that GPipe's schedule has."""
    # In a process that has no other graphs.
    found = devices.run(
        SETUP,
        """
        with scope(4):
            model = keras.Sequential(
                [keras.Input((6,)), layers.Dense(6, name="on0"),
                 layers.Dense(6, name="on1"), layers.Dense(6, name="on2")])
            model.compile("sgd", "mse")
        x = np.ones((8, 6), "float32")
        model.train_on_batch(x, x)
        import gc
        from tensorflow.python.framework.func_graph import FuncGraph
        names = [op.device[-5:] for graph in gc.get_objects()
                 if isinstance(graph, FuncGraph)
                 for op in graph.get_operations() if "micro_batch_done" in op.name]
        result([sorted(names), str(model.distribute_strategy.pipeline())])
    """,
    )

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


ZOO_SCRIPT = (
    begin(3)
    + """
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import placement_zoo as zoo

for name, cuts in json.loads(os.environ["CUTS"]).items():
    kind = zoo.ZOO[name]
    plain = zoo.plain_numbers(name, os.environ["PLAIN"])
    for parts, count in cuts:
        devices = [f"CPU:{i}" for i in range(count)]
        strategy = kerasdist.ModelParallelStrategy(
            zoo.placement(kind, devices), devices=devices, micro_batches=parts,
            rematerialize=parts == 4)
        found = zoo.numbers(kind, strategy.scope, None)
        model = found.pop("model")
        # What is computed in 16 bits is rounded after other sums.
        how = {"rtol": 1e-2, "atol": 2e-3} if name == "half" else {
            "rtol": 1e-5, "atol": 5e-6}
        differ = [
            f"{mine} {np.max(np.abs(found[mine] - plain[theirs]))}"
            for mine, theirs in zip(found, plain, strict=True)
            if not np.allclose(found[mine], plain[theirs], **how)]
        print("RESULT", json.dumps([
            name, parts, differ[:5], zoo.misplaced_variables(model, devices)[:5]]),
            flush=True)
"""
)


# Numbers of parts and devices. With four parts activations are computed again.
CUTS = ((3, 3), (4, 2), (3, 2), (4, 3))
# In the suite one kind has one of them; the soak test has all others.
CUT = {"everything": CUTS[1]}


def differences(cuts, plain):
    """Of each kind of model and its cuts what differs from the model as it is."""
    env = {
        "TESTS": SCRIPTS_PATH,
        "PLAIN": str(plain),
        "CUTS": json.dumps(cuts),
        "TF_CONFIG": None,
    }
    with Workers(ZOO_SCRIPT, 1, env=env, deadline=580) as job:
        return job.succeed()[0].results


@pytest.mark.timeout(300)
def test_kinds_of_models(plain_folder):
    """With batches of 4 rows, and of 2 at last."""
    found = differences({name: [cut] for name, cut in CUT.items()}, plain_folder)

    assert found == [[name, parts, [], []] for name, (parts, _) in CUT.items()]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kinds_of_models_in_other_cuts(plain_folder):
    others = {name: [c for c in CUTS if c != CUT.get(name)] for name in BY_ROWS}

    found = differences(others, plain_folder)

    assert len(BY_ROWS) >= 12
    assert sorted(found) == sorted(
        [name, parts, [], []] for name, cuts in others.items() for parts, _ in cuts
    )
