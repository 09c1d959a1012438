import pytest
from scripts import with_prelude

from workers import Workers

SCRIPT = with_prelude("""
class Scaled(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable([[1.0], [2.0]])
        self.calls = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def __call__(self, x):
        self.calls.assign_add(1.0)
        return x @ self.kernel

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def predict(self, x):
        return x @ self.kernel

logical_devices(2)
both = ["CPU:0", "CPU:1"]
STRATEGIES = {
    "plain": tf.distribute.get_strategy,
    "ring": lambda: kerasdist.RingStrategy(devices=["CPU:0"], timeout=60),
    "replicas": lambda: kerasdist.RingStrategy(devices=both, timeout=60),
    "async": lambda: kerasdist.ParameterServerStrategy(mode="async"),
    "placed": lambda: kerasdist.ModelParallelStrategy("auto", devices=both),
}
x = np.arange(48, dtype="float32").reshape(24, 2) / 48

def use(strategy, path):
    found = {}
    with strategy.scope():
        loaded = tf.saved_model.load(path)
        found["twice"] = [loaded(x).numpy().tolist() for _ in range(2)]
        found["calls"] = float(loaded.calls.numpy())
        copies = getattr(loaded.calls, "values", [loaded.calls])
        found["copies"] = [float(copy.numpy()) for copy in copies]
        found["traced"] = tf.function(lambda x: loaded(x))(x).numpy().tolist()
        tf.saved_model.save(loaded, path + "-again")
        again = tf.saved_model.load(path + "-again")
        found["again"] = again(x).numpy().tolist()
        frozen = keras.layers.TFSMLayer(path, call_endpoint="predict", trainable=False)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), frozen, keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        fit = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found["losses"] = fit.history["loss"]
    return found

for kind in sys.argv[2:]:
    strategy = STRATEGIES[kind]()
    path = f"{sys.argv[1]}/{kind}-{os.getpid()}"
    tf.saved_model.save(Scaled(), path)
    result([kind, use(strategy, path)])
    if hasattr(strategy, "close"):
        strategy.close()
""")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kinds", "size", "servers"),
    [(("ring", "replicas"), 2, 0), (("async", "placed"), 1, 1)],
)
def test_they_can_be_called_in_the_scope(kinds, size, servers, tmp_path):
    """TensorFlow gives them placeholders there: "Trying to access a placeholder that is
    not supposed to be executed"."""
    args = [str(tmp_path), *kinds, "plain"]  # a server ends in the first one
    workers = Workers(SCRIPT, size, args, deadline=120, servers=servers).run()[:size]
    for worker in workers:
        *others, (_, plain) = worker.results
        assert [kind for kind, _ in others] == list(kinds)
        for kind, found in others:
            copies = found.pop("copies")
            assert copies == [plain["calls"]] * (2 if kind == "replicas" else 1)
            assert found.pop("losses") == pytest.approx(plain["losses"], rel=1e-5)
            for name, value in found.items():
                assert value == plain[name], (kind, name)
