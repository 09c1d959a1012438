import textwrap

from devices import TWO_LAYERS

from workers import Workers

SCRIPT = """
def build(widths=(512, 512, 512)):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            *(keras.layers.Dense(width, activation="tanh") for width in widths),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(2),
        ]
    )

def train(strategy, model_fn=build, predicts=False, **given):
    import contextlib
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_fn()
        model.compile("adam", "mse", **given)
    made = sorted({device(v) for v in model.variables})
    if predicts:
        model.predict(x, verbose=0)
    model.fit(x, y, batch_size=4, verbose=0)
    return model, made

plain, _ = train(None, jit_compile=False)
auto = kerasdist.ModelParallelStrategy("auto", devices=["CPU:1", "CPU:2"])
unplanned = auto.plan is None
model, made = train(auto)

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(64)
        self.second = keras.layers.Dense(2)
    def call(self, x):
        return self.second(self.first(x))

subclassed, _ = train(
    kerasdist.ModelParallelStrategy("auto", devices=["CPU:1", "CPU:2"]), Own, True
)
lengths = kerasdist.ModelParallelStrategy("auto", devices=["CPU:1", "CPU:2"])
with lengths.scope():
    words = keras.Input((None,))
    table = keras.layers.Embedding(10, 4)(words)
    pooled = keras.layers.GlobalAveragePooling1D()(table)
    open_model = keras.Model(words, keras.layers.Dense(2)(pooled))
    open_model.compile("adam", "mse")
data = tf.data.Dataset.from_tensor_slices((x, y)).padded_batch(
    2, padded_shapes=([None], [2]))
tight = kerasdist.ModelParallelStrategy(
    "auto", devices=["CPU:1"], memory_limits={"CPU:1": 1000}
)
print("RESULT", json.dumps({
    "unplanned": unplanned,
    "made": made,
    "planned": list(auto.plan.placement.values()),
    "devices": [device(v) for v in model.trainable_variables],
    "slots": [device(v) for v in model.optimizer.variables[2:]],
    "difference": max(
        float(abs(a - b).max())
        for a, b in zip(plain.get_weights(), model.get_weights())
    ),
    "subclassed": sorted({device(v) for v in subclassed.trainable_variables}),
    "tight": message(train, tight),
    "unknown": message(open_model.fit, data),
    "lengths": message(open_model.fit, x, y, batch_size=4, verbose=0)
    or sorted(set(lengths.plan.placement.values())),
    "limits": message(
        kerasdist.ModelParallelStrategy, {"a": "CPU:0"}, memory_limits={"CPU:0": 1}
    ),
}))
"""


def test_variables_move_to_where_the_plan_says():
    found = Workers(TWO_LAYERS + textwrap.dedent(SCRIPT), 1).run()[0].result

    assert found["unplanned"]
    assert found["made"] == ["CPU:0"]
    assert set(found["planned"]) == {"CPU:1", "CPU:2"}
    # Two variables for each layer; dropout of nothing isn't one that does anything.
    assert found["devices"] == [name for name in found["planned"] for _ in range(2)]
    assert found["slots"] == [name for name in found["devices"] for _ in range(2)]
    assert found["difference"] < 1e-6
    assert set(found["subclassed"]) <= {"CPU:1", "CPU:2"}
    assert found["tight"].startswith("PlanError: The model doesn't fit")
    assert set(found["lengths"]) <= {"CPU:1", "CPU:2"}
    text = 'ValueError: With placement="auto" the sizes of inputs must be known'
    assert found["unknown"].startswith(text)
    assert "Memory limits are for a plan." in found["limits"]
