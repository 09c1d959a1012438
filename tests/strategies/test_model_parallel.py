import textwrap

import pytest
from devices import TWO_LAYERS, running


@pytest.fixture(scope="module")
def run():
    with running("from pathlib import Path\n" + TWO_LAYERS) as run:
        yield run


def test_it_says_what_is_wrong_before_it_trains(run):
    script = """
    strategy = kerasdist.ModelParallelStrategy
    found = {
        "no mapping": message(strategy, ["CPU:0"]),
        "no names": message(strategy, {"a": 1}),
        "no device": message(strategy, {"a": "GPU:7", "b": "what?", "c": "CPU:1"}),
        "no pattern": message(strategy, {"(": "CPU:0"}),
        "not among": message(strategy, {"a": "CPU:1"}, devices=["CPU:0"]),
        "stage": message(strategy({"a": "CPU:0"}).stage, "CPU:2"),
    }
    for name, options in {
        "fit": {},
        "predict": {},
        "jit": {"jit_compile": True},
    }.items():
        placed = strategy({"first": "CPU:1", "third/.*": "CPU:2"})
        if name == "jit":
            placed = strategy({"first": "CPU:1"})
        with placed.scope():
            model = two_layers()
            found[name] = message(model.compile, "sgd", "mse", **options)
        data = (x,) if name == "predict" else (x, y)
        found[name] = found[name] or message(getattr(model, name), *data, verbose=0)
    result(found)
    """
    found = run(script)

    begin = {
        "no mapping": "TypeError: `placement` must be a mapping from patterns",
        "no names": "TypeError: `placement` must map text to text",
        "no device": "ValueError: `placement` can't be used: 'GPU:7' doesn't exist; "
        "'what?' isn't a device name. Received",
        "no pattern": "ValueError: The patterns of a placement must be regular",
        "not among": "ValueError: `placement` names devices that aren't among",
        "stage": "ValueError: A stage must be on one of the strategy's devices.",
        "fit": "ValueError: Patterns of the placement match no layer. "
        "Received: 'third/.*'; the layers are",
        "predict": "ValueError: Patterns of the placement match no layer.",
        "jit": "ValueError: XLA compiles a step for one device",
    }
    assert {name: found[name][: len(text)] for name, text in begin.items()} == begin


@pytest.mark.soak
def test_what_no_pattern_matches_goes_with_its_caller_then_to_the_first_device(run):
    script = """
    def devices(model):
        return {v.path.partition("/")[2]: device(v) for v in model.variables}

    class Block(keras.layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.inner = keras.layers.Dense(4, name="inner")
            self.guest = keras.layers.Dense(4, name="guest")

        def call(self, x):
            return self.guest(self.inner(x))

    names = ["CPU:0", "CPU:1", "CPU:2"]
    strategy = kerasdist.ModelParallelStrategy(
        {"block/.*": "CPU:1", "block/guest": "CPU:2"}, devices=names
    )
    with strategy.scope():
        model = keras.Sequential([Block("block"), keras.layers.Dense(2, name="rest")])
        with strategy.stage("CPU:2"):
            model.add(keras.layers.Dense(2, name="staged"))
        model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    found = {"patterns": devices(model)}

    # Two models of one strategy whose layers have the same paths.
    strategy = kerasdist.ModelParallelStrategy({"m/a": "CPU:1"}, devices=names)
    models = []
    with strategy.scope():
        for size in (3, 5):
            a = keras.layers.Dense(size, name="a")
            b = keras.layers.Dense(2, name="b")
            models.append(keras.Sequential([keras.Input((8,)), a, b], name="m"))
            models[-1].compile("sgd", "mse")
    for _ in range(2):
        for model in models:
            model.fit(x, y, verbose=0)
    found["models"] = [devices(model) for model in models]
    found["steps"] = strategy.placement_report().steps["train"].devices_of("m/a")

    # By single batches.
    logs = model.train_on_batch(x, y), model.test_on_batch(x, y)
    found["on batch"] = [len(model.predict_on_batch(x)), logs[1] < logs[0]]
    result(found)
    """
    found = run(script)

    def both(layer, name):
        return {f"{layer}/kernel": name, f"{layer}/bias": name}

    assert found["patterns"] == {
        **both("block/inner", "CPU:1"),
        **both("block/guest", "CPU:2"),
        **both("rest", "CPU:0"),
        **both("staged", "CPU:2"),
    }
    assert found["models"] == [both("a", "CPU:1") | both("b", "CPU:0")] * 2
    assert found["steps"] == ["/job:localhost/replica:0/task:0/device:CPU:1"]
    assert found["on batch"] == [4, True]


def test_saved_models_have_no_devices_and_the_report_prices_what_moves(run, tmp_path):
    script = """
    import zipfile
    from tensorflow.core.protobuf import saved_model_pb2

    strategy = kerasdist.ModelParallelStrategy({"first": "CPU:1", "second": "CPU:2"})
    with strategy.scope():
        model = two_layers()
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    report = strategy.placement_report().steps
    found = {
        "kinds": sorted(report),
        "moves": [
            [move.source[-5:], move.target[-5:], move.bytes(4), move.unknown]
            for move in report["train"].moves
        ],
        "rows": report["train"].rows,
    }
    expected = model.predict(x, verbose=0)

    model.save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as file:
        found["named"] = [n for n in file.namelist() if b"CPU:" in file.read(n)]
    plain = keras.models.load_model(folder / "model.keras")
    other = kerasdist.ModelParallelStrategy({"first": "CPU:2", "second": "CPU:0"})
    with other.scope():
        moved = keras.models.load_model(folder / "model.keras")
    moved.fit(x, y, epochs=0)
    found["loaded"] = [
        [device(v) for v in (*m.weights, *m.optimizer.variables[2:4])]
        for m in (plain, moved)
    ]
    found["same"] = [
        bool(np.array_equal(m.predict(x, verbose=0), expected)) for m in (plain, moved)
    ]

    with strategy.scope():
        model.export(folder / "exported", verbose=False)
    saved = saved_model_pb2.SavedModel.FromString(
        (folder / "exported" / "saved_model.pb").read_bytes()
    )
    (graph,) = (meta.graph_def for meta in saved.meta_graphs)
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    found["exported"] = [
        n.name for n in nodes if "CPU:1" in n.device or "CPU:2" in n.device
    ]
    served = tf.saved_model.load(folder / "exported")
    found["same"].append(bool(np.allclose(served.serve(x), expected, rtol=1e-6)))

    result(found)
    """
    found = run(f"folder = Path({str(tmp_path)!r})" + textwrap.dedent(script))

    assert found["kinds"] == ["train"]
    assert found["rows"] == 4
    moves = {(source, target): rest for source, target, *rest in found["moves"]}
    # Gradients of 4 rows of 3 numbers come back from the second layer, with a scalar.
    assert moves["CPU:2", "CPU:1"][0] in range(48, 64)
    # They went there before, and with them scalars of Adam.
    assert moves["CPU:1", "CPU:2"][0] in range(48, 128)
    assert {unknown for _, unknown in moves.values()} == {0}
    assert found["named"] == []
    first = ["CPU:2"] * 2 + ["CPU:0"] * 2 + ["CPU:2"] * 2
    assert found["loaded"] == [["CPU:0"] * 6, first]
    assert found["same"] == [True, True, True]
    assert found["exported"] == []


def test_models_that_arent_compiled_predict(run):
    """An encoder is never compiled; its optimizer was asked for."""
    found = run("""
    found = []
    for placement in ({}, {"first": "CPU:1", "second": "CPU:2"}, "auto"):
        with kerasdist.ModelParallelStrategy(
            placement, devices=["CPU:0", "CPU:1", "CPU:2"]
        ).scope():
            keras.utils.set_random_seed(1)
            model = two_layers()
            model.build((None, 8))
        found += [model.predict(x, verbose=0), model.predict_on_batch(x)]
    result([float(abs(each - found[0]).max()) for each in found])
    """)
    assert max(found) < 1e-6


@pytest.mark.soak
def test_a_pattern_may_wait_for_a_later_model_beside_a_catch_all(run):
    script = """
    import warnings
    strategy = kerasdist.ModelParallelStrategy({"second": "CPU:1", ".*": "CPU:2"})
    with warnings.catch_warnings(record=True) as caught, strategy.scope():
        warnings.simplefilter("always")
        for names in (["a"], ["b"], ["second"]):
            layers = [keras.layers.Dense(2, name=name) for name in names]
            model = keras.Sequential([keras.Input((8,)), *layers])
            model.compile("sgd", "mse")
            model.fit(x, y, verbose=0)
    said = [str(w.message) for w in caught if "Patterns" in str(w.message)]
    result([said, device(model.variables[0])])
    """
    said, place = run(script)
    (text,) = said
    assert text.startswith("Patterns of the placement match no layer. Received: 'sec")
    assert text.endswith("unless a later model has it.")
    assert place == "CPU:1"


def test_layers_that_were_built_outside_of_the_scope_are_trained_in_their_place(run):
    script = """
    strategy = kerasdist.ModelParallelStrategy({"first": "CPU:1", ".*": "CPU:0"})
    outside = keras.layers.Dense(4, name="first")
    outside.build((None, x.shape[1]))
    before = outside.get_weights()[0]
    with strategy.scope():
        inputs = keras.Input((x.shape[1],))
        model = keras.Model(inputs, keras.layers.Dense(1, name="last")(outside(inputs)))
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(x, np.ones((len(x), 1)), epochs=1, verbose=0)
    devices = {v.path: v.value.device[-5:] for v in model.optimizer.variables}
    moved = bool(np.abs(outside.get_weights()[0] - before).max() > 0)
    result([moved, outside.kernel.value.device[-5:], devices])
    """
    moved, device, slots = run(script)
    assert moved
    assert device == "CPU:1"
    found = {path: where for path, where in slots.items() if "first_kernel" in path}
    assert set(found.values()) == {"CPU:1"}, slots
