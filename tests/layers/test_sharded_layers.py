import devices
import pytest
from devices import begin

from places import SCRIPTS_PATH

SETUP = begin(3)
SETUP += """
from kerasdist.layers import ShardedDense, ShardedEmbedding

THREE = ["CPU:0", "CPU:1", "CPU:2"]
rng = np.random.default_rng(0)
words, labels = rng.integers(-2, 50, (40, 7)), rng.integers(0, 10, 40)

def plain_layers():
    return keras.layers.Embedding, keras.layers.Dense

def sharded_layers(**how):
    return (lambda *args, **kwargs: ShardedEmbedding(*args, **kwargs, **how),
            lambda *args, **kwargs: ShardedDense(*args, **kwargs, **how))

def build(layers, dtype="float32", eagerly=True, clear=True):
    embedding, dense = layers
    if clear:  # not inside of a scope
        keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    given = keras.Input((7,), dtype="int32")
    x = embedding(50, 20, mask_zero=True, embeddings_regularizer="l2", dtype=dtype)(
        given)
    x = dense(17, "gelu", kernel_regularizer="l1",
              bias_regularizer=keras.regularizers.L2(0.1),
              activity_regularizer="l2" if dtype == "float32" else None,
              dtype=dtype)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = dense(10, activation="softmax", kernel_constraint="non_neg",
              kernel_regularizer=keras.regularizers.OrthogonalRegularizer(),
              bias_initializer="random_normal", dtype=dtype)(x)
    model = keras.Model(given, x)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0),
                  "sparse_categorical_crossentropy", metrics=["accuracy"],
                  run_eagerly=eagerly)  # nothing is traced: faster
    return model

def whole(model):
    kernels = []
    for layer in model.layers:
        for name in ("embeddings", "kernel", "bias"):
            if getattr(layer, name, None) is not None:
                kernels.append(numpy(getattr(layer, name)))
    return kernels

def fit(model):
    return model.fit(
        words, labels, batch_size=16, epochs=1, shuffle=False, verbose=0).history
"""


@pytest.fixture(scope="module")
def run():
    with devices.running(SETUP) as run:
        yield run


def test_they_compute_and_learn_what_plain_layers_do(run):
    """From the same initial weights, with what a Dense layer can be asked for."""
    devices, kinds = run("""
        plain = build(plain_layers())
        before = whole(plain)
        history, predicted = fit(plain), numpy(plain(words))
        devices, kinds = {}, []
        for split in ("columns", "rows"):
            model = build(sharded_layers(split=split, devices=THREE))
            for a, b in zip(before, whole(model), strict=True):
                np.testing.assert_array_equal(a, b)
            devices[split] = {
                w.path: (w.value.device[-5:], list(w.shape)) for w in model.weights}
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(model(words, training=True))
            gradients = tape.gradient(value, model.trainable_weights)
            kinds.append([type(g).__name__ for g in gradients[:3]])
            found = fit(model)
            for name in history:
                np.testing.assert_allclose(found[name], history[name], rtol=1e-6)
            for a, b in zip(whole(plain), whole(model), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(numpy(model(words)), predicted, rtol=1e-4)
        result([devices, kinds])
    """)

    assert kinds == [["IndexedSlices"] * 3] * 2
    assert devices["columns"]["dense/shard_1/kernel"] == ["CPU:1", [20, 6]]
    assert devices["columns"]["dense/shard_2/bias"] == ["CPU:2", [5]]
    assert devices["columns"]["embedding/shard_2/embeddings"] == ["CPU:2", [50, 6]]
    assert devices["rows"]["dense/shard_1/kernel"] == ["CPU:1", [7, 17]]
    assert devices["rows"]["dense/bias"] == ["CPU:0", [17]]
    assert devices["rows"]["embedding/shard_2/embeddings"] == ["CPU:2", [16, 20]]


@pytest.mark.soak
def test_their_files_hold_whole_kernels(run):
    """Of plain layers, and for any number of shards; there are no devices in them."""
    same = run("""
        import zipfile
        def equal(mine, others):
            for a, b in zip(mine, others, strict=True):
                np.testing.assert_array_equal(a, b)
        with tempfile.TemporaryDirectory() as folder:
            for split in ("columns", "rows"):
                model = build(sharded_layers(split=split, devices=THREE))
                fit(model)
                model.save(f"{folder}/model.keras")
                model.save_weights(f"{folder}/sharded.weights.h5")
                with zipfile.ZipFile(f"{folder}/model.keras") as archive:
                    assert b"CPU" not in archive.read("config.json")

                loaded = keras.models.load_model(f"{folder}/model.keras")
                assert [layer.shards for layer in loaded.layers
                        if hasattr(layer, "shards")] == [3, 3, 3]
                equal(whole(loaded), whole(model))
                # Without an optimizer's state, which is that of shards.
                plain = keras.Model.from_config(build(plain_layers()).get_config())
                plain.load_weights(f"{folder}/sharded.weights.h5")
                equal(plain.get_weights(), whole(model))
                plain.save_weights(f"{folder}/plain.weights.h5")
                other = keras.Model.from_config(
                    build(sharded_layers(split=split, shards=2)).get_config())
                other.load_weights(f"{folder}/plain.weights.h5")
                equal(whole(other), whole(model))
            # The optimizer's state too: they go on as one.
            fit(loaded), fit(model)
            for a, b in zip(whole(loaded), whole(model), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        layer = ShardedDense(5, shards=2, name="wide")
        layer.build((None, 4))
        result([refused(lambda: layer.load_own_variables({"0": np.zeros((4, 5))})),
                refused(lambda: layer.load_own_variables(
                    {"0": np.zeros((4, 6)), "1": np.zeros(5)}))])
    """)

    assert same == [
        "Layer 'wide' expects 2 variables: the whole kernel and bias. "
        "Received: 1 variables for a layer that is built. Load into a model of the "
        "same layers.",
        "`kernel` of layer 'wide' has another shape in the file. "
        "Received: shape (4, 6); expected (4, 5). Load into a layer with the same "
        "arguments; only the number of shards may differ.",
    ]


@pytest.mark.soak
def test_mixed_precision_ragged_words_and_given_tables(run):
    run("""
        history = fit(build(plain_layers(), dtype="mixed_float16"))
        model = build(sharded_layers(shards=3), dtype="mixed_float16")
        np.testing.assert_allclose(fit(model)["loss"], history["loss"], rtol=2e-3)
        assert model.layers[1].compute_dtype == "float16"

        for split in ("columns", "rows"):
            table = rng.normal(size=(9, 4)).astype("float32")
            layer = ShardedEmbedding(9, 4, shards=2, split=split, weights=table)
            np.testing.assert_array_equal(numpy(layer.embeddings), table)
            ragged = tf.ragged.constant([[1, 2, 8], [], [-1]])
            found = layer(ragged)
            np.testing.assert_array_equal(
                found.flat_values.numpy(), table[[1, 2, 8, -1]])
            assert found.row_lengths().numpy().tolist() == [3, 0, 1]
            assert layer(np.zeros((2, 3, 5))).shape == (2, 3, 5, 4)
            assert layer.compute_output_shape((None, 3)) == (None, 3, 4)

        # Where initial values are drawn inside of a graph, and twice.
        layer, dense = ShardedDense(6, shards=2), keras.layers.Dense(6)
        layer.kernel_initializer = dense.kernel_initializer
        tf.function(layer)(tf.ones((2, 3)))
        dense(tf.ones((2, 3)))
        np.testing.assert_array_equal(numpy(layer.kernel), numpy(dense.kernel))
        layer.trainable = False
        assert not layer.trainable_weights and len(layer.weights) == 4
        result(0)
    """)


@pytest.mark.soak
def test_each_shard_s_gradients_are_computed_on_its_device(run):
    """Whatever patterns say: a shard names its device."""
    found = run(f"""
        sys.path[:0] = {SCRIPTS_PATH!r}.split(os.pathsep)
        import placement_zoo as zoo

        found = {{}}
        for split in ("rows", "columns"):
            keras.backend.clear_session()
            strategy = kerasdist.ModelParallelStrategy({{".*": "CPU:0"}}, devices=THREE)
            with zoo.run_metadata() as graphs:
                with strategy.scope():
                    model = build(
                        sharded_layers(split=split), eagerly=False, clear=False)
                fit(model)
            # Where the products of each shard were computed, forward and back.
            found[split] = sorted({{
                (node.device[-5:], shard.group(1), "gradient_tape" in node.name)
                for graph in graphs for node in graph.node
                if (shard := re.search(r"shard_(\\d)", node.name))
                and "MatMul" in node.op}})
        result(found)
    """)

    own = [[f"CPU:{i}", str(i), back] for i in range(3) for back in (False, True)]
    assert found == {"rows": own, "columns": own}


def test_a_ring_with_a_placement_and_one_without(run):
    """Once both were taken for a ModelParallelStrategy, whose `devices` they lack."""
    placed, plain, message = run("""
        def shards(**placement):
            with kerasdist.RingStrategy(timeout=60, **placement).scope():
                layer = ShardedDense(6)
                layer.build((None, 4))
            kernels = [v for v in layer.variables if "kernel" in v.path]
            return [str(v.value.device)[-5:] for v in kernels]

        with kerasdist.RingStrategy(timeout=60).scope():
            layer = ShardedDense(6, devices=THREE)
            message = refused(lambda: layer.build((None, 4)))
        result([shards(placement={}, devices=THREE), len(shards()), message])
    """)

    assert placed == ["CPU:0", "CPU:1", "CPU:2"]
    assert plain == 1
    assert "need a strategy that places layers" in message
    assert "under RingStrategy" in message


def test_what_they_refuse(run):
    messages = run("""
        norm = keras.constraints.MaxNorm
        def built(layer):
            layer.build((None, 6))

        good = ShardedDense(8, shards=2, split="rows", kernel_constraint=norm(axis=1),
                            bias_constraint=norm(axis=0))
        built(good)
        result([
            refused(lambda: ShardedDense(8, split="diagonal", shards=0)),
            refused(lambda: ShardedDense(8, devices=THREE, shards=2)),
            refused(lambda: built(ShardedDense(2, devices=THREE))),
            refused(lambda: built(ShardedDense(8, devices=["CPU:0", "CPU:7"]))),
            refused(lambda: built(ShardedDense(
                8, shards=2, kernel_constraint=norm(axis=1)))),
            refused(lambda: ShardedDense(8, name="wide").enable_lora(2),
                    NotImplementedError),
            refused(lambda: good.quantize("int8"), NotImplementedError),
            refused(lambda: ShardedEmbedding(8, 2)(tf.sparse.eye(3))),
        ])
    """)
    begin = [
        "`split` is 'columns' or 'rows'. Received: split='diagonal'; `shards` is",
        "`devices` names one device for each of the `shards`. Received: shards=2,",
        "A layer can't have more shards than its matrix has columns. Received: 3",
        "There are no such devices. Received: devices=['CPU:7']; there are ['CPU:0'",
        "`kernel_constraint` must treat each shard as it treats the whole. Received:",
        "A sharded layer has no LoRA. Received: rank=2 for layer 'wide'.",
        "A sharded layer can't be quantized. Received: mode='int8' for layer",
        "A sharded embedding doesn't look up sparse tensors. Received:",
    ]

    for message, start in zip(messages, begin, strict=True):
        assert start in message
