"""The noise of gradients, measured in `fit`, against a model whose noise is known."""

import pytest
from scripts import with_prelude

from workers import Workers

pytestmark = [pytest.mark.timeout(200), pytest.mark.soak]

# A sample's gradient is w - x, and w stays near 0: its square is that of the samples'
# mean, its variance theirs.
SCRIPT = with_prelude("""
class Point(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="zeros")
    def call(self, x):
        return self.w - x

class Half(keras.losses.Loss):
    def call(self, y, difference):
        return 0.5 * keras.ops.sum(difference**2, -1)

rng = np.random.default_rng(0)
x = rng.normal(0.3, 1.0, size=(6_400, 64)).astype("float32")
square = float((x.mean(0) ** 2).sum())
true = [square, float(x.var(0).sum())]

def fit(strategy, *callbacks, x=x, window=None, **compile):
    with strategy.scope():
        m = keras.Sequential([keras.Input((64,)), Point()])
        sgd = keras.optimizers.SGD(1e-9, gradient_accumulation_steps=window)
        m.compile(sgd, Half(), **compile)
    m.fit(x, x, batch_size=32, verbose=0, callbacks=[*callbacks])

def measured(strategy, **compile):
    board = kerasdist.callbacks.ScalingTensorBoard(
        f"{os.environ['FOLDER']}/{len(found)}", verbose=0)
    strategy.extended.kerasdist.hooks.norms.always = True
    fit(strategy, board, **compile)
    if board.figures is not None:
        f = board.figures
        return [[f.noise.gradient, f.noise.variance], f.next_worker, f.goodput]

class Gains(keras.callbacks.Callback):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.gains = scale, []
    def on_epoch_end(self, epoch, logs=None):
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.gains += [self.scale.factor, rate]

def gains(x, **options):
    scale = kerasdist.callbacks.ScaleLearningRate("adascale", verbose=0, **options)
    seen = Gains(scale)
    # The board reads the same sums.
    board = kerasdist.callbacks.ScalingTensorBoard(os.environ["FOLDER"], verbose=0)
    fit(ring, board, scale, seen, x=x)
    return seen.gains + [scale.gained_steps]

found = {}
ring = kerasdist.RingStrategy(timeout=60)
found["ring"] = measured(ring)
found["compiled"] = measured(ring, jit_compile=True)
found["same"] = gains(np.ones_like(x))
found["noise"] = gains(x - x.mean(0))
found["between"] = gains(x, base_batch_size=4)
found["refused"] = refused(lambda: gains(x, warmup_steps=3))
found["windows"] = refused(lambda: fit(
    ring, kerasdist.callbacks.ScaleLearningRate("adascale"), window=2))
compressed = kerasdist.RingStrategy(timeout=60, compression="powersgd")
with compressed.scope():
    pass
found["compressor"] = refused(lambda: fit(
    compressed, kerasdist.callbacks.ScaleLearningRate("adascale")))
found["factors"] = measured(kerasdist.RingStrategy(timeout=60, compression="factors"))
found["elastic"] = measured(kerasdist.RingStrategy(timeout=60, elastic=True))
result([found, true])
""")


def test_the_noise_of_a_quadratic(tmp_path):
    env = {"FOLDER": str(tmp_path)}
    with Workers(SCRIPT, 2, env=env, deadline=150) as job:
        chief, other = (each.result for each in job.succeed())
    found, (square, variance) = chief
    for kind in ("ring", "compiled", "factors", "elastic"):
        noise, next_worker, goodput = found[kind]
        # 200 steps of 32 samples: a standard deviation is 1.3 %.
        assert noise == pytest.approx([square, variance], rel=0.06), kind
        assert 0 < next_worker < 1
        assert goodput > 0
    # Two workers: a step is worth two of one, or one.
    factor, rate, gained = found["noise"]
    assert factor == pytest.approx(2.0, abs=0.1)
    assert rate == pytest.approx(1e-9 * factor)
    assert 350 < gained <= 400
    assert found["same"] == pytest.approx([1.0, 1e-9, 200.0])
    small, large = square + variance / 4, square + variance / 32
    assert found["between"][0] == pytest.approx(small / large, rel=0.1)
    assert "Received: rule='adascale' with warmup_steps=3" in found["refused"]
    assert "at least two replicas" in found["compressor"]
    assert "Received: gradient_accumulation_steps=[2]" in found["windows"]
    # All workers have the same rate.
    assert [other[0][name] for name in ("noise", "between")] == [
        found[name] for name in ("noise", "between")
    ]
